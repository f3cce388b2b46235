#!/bin/sh
# The trainer on the fake GPU: the losses of train_gpt, within 1e-4 in f32, similar in bf16. The weights are
# the same on any number of ranks along dp, with every strategy, with stages, graphs or recomputation, and
# similar with --tp, --order any, --reduce-dtype, --tied-grads merged or --dtype f16. Checkpoints go to train_gpt, train_gpt_fsdp and train_gpt_3d and back. Inside a step the
# host never waits. Invalid input is one sentence.
# usage: train_gpt_cuda.sh path/of/train_gpt_cuda [folder of the other trainers]; the program is
# support/gpt_tests.cu under that name, with llmc in the same folder
bench=$(cd "$(dirname "$0")/../../bench/gpu" && pwd)
. "$(dirname "$0")/../support/train_gpt.sh"
folder=$(dirname "$program")
trainers=${2:-$folder}

seq 1 300 > text
run="--layers 2 --heads 2 --channels 32 --context 16 --micro-batch 2 --batch 8 --lr 0.01 --seed 7"
tables='/^  ranks  /,/^$/d; /^  step .* of rank 0/,/^$/d; /^.*: steps /d; /^---/,/^---/d'
seed=1

# cuda NAME FLAGS...: the trainer, with streams in another order each time.
cuda() {
    as=$1
    shift
    seed=$((seed + 1))
    DDP_TEST_SEED=$seed
    export DDP_TEST_SEED
    train_with "$as" "$program" --threads-as-ranks "$@"
}
same_hash() { [ "$(hash_of "$1")" = "$(hash_of "$2")" ] || fail "$1 ends with $(hash_of "$1"), $2 with $(hash_of "$2")"; }
# near NAME AS: the losses, within 0.02.
near() {
    losses "$1" > "$1.losses"
    losses "$2" > as.losses
    paste as.losses "$1.losses" | awk 'NF != 2 || $1 - $2 > 0.02 || $2 - $1 > 0.02 { bad = 1 } END { exit bad || !NR }' ||
        { paste as.losses "$1.losses" >&2; fail "$1: the losses are not near those of $2"; }
}
number() { sed -n "s/.*$2 \([0-9]*\).*/\1/p" "$1.err" | tail -n 1; }

# --- losses, and the same bits ---

# shellcheck disable=SC2086
{
    train_with whole "$trainers/train_gpt" $run --steps 10 --ranks 1
    cuda f32 $run --steps 10 --dtype f32
    close f32
    [ "$(number f32 watched)" -ge 16 ] || fail "steps were not watched: $(cat f32.err)"
    cuda f32_full4 $run --steps 10 --dtype f32 --ranks 4
    same_hash f32 f32_full4
    cuda bf16 $run --steps 10
    near bf16 whole
    # The eight steps that were looked at have four micro-batches each, and no product is launched outside of
    # their graphs.
    for name in f32 bf16; do
        [ "$(number $name graphs) $(number $name products)" = "32 0" ] || fail "$name: one graph per micro-batch was to be launched: $(cat $name.err)"
    done

    short="$run --steps 4"
    cuda one $short --strategy none
    cuda again $short --strategy none --no-graphs --recompute
    same_hash one again
    cuda unit_graphs $short --strategy none --ranks 2 --recompute
    same_hash one unit_graphs
    for way in full grad optim; do # graphs of one rank, and without
        cuda "$way recompute" $short --strategy $way --recompute
        same_hash one "$way recompute"
        cuda "$way plain" $short --strategy $way --no-graphs
        same_hash one "$way plain"
    done
    long="$run --steps 4 --batch 16" # of 8 micro-batches on one rank, and 4 on two, two of which have nothing between their units
    cuda long $long --no-graphs
    cuda long_graphs $long
    same_hash long long_graphs
    for way in optim none; do
        cuda "long $way" $long --ranks 2 --strategy $way
        same_hash long "long $way"
    done
    [ "$(number "long optim" graphs) $(number "long optim" products)" = "72 0" ] || fail "long optim: $(cat "long optim.err")"
    for type in bf16 f32; do # one micro-batch in a step
        cuda "single $type" $run --steps 4 --batch 2 --dtype $type
        cuda "single $type plain" $run --steps 4 --batch 2 --dtype $type --no-graphs
        same_hash "single $type" "single $type plain"
        [ "$(number "single $type" graphs) $(number "single $type" products)" = "2 0" ] || fail "single $type: $(cat "single $type.err")"
    done
    for way in 'full 1' 'full 2' 'full 4' 'grad 2' 'optim 2' 'optim 4' 'none 4'; do
        cuda "$way" $short --strategy ${way% *} --ranks ${way#* }
        same_hash one "$way"
    done
    # One gradient for both uses of wte: other bits, but the same ones with every strategy and number of ranks.
    # wte has 256 x 32 elements of 4 bytes, of which a rank sends three quarters. Two steps were watched.
    cuda merged $short --tied-grads merged
    near merged one
    [ "$(hash_of merged)" != "$(hash_of one)" ] || fail "--tied-grads merged changed nothing"
    for way in 'full 4' 'optim 2' 'none 2'; do
        cuda "merged $way" $short --tied-grads merged --strategy ${way% *} --ranks ${way#* }
        same_hash merged "merged $way"
    done
    saved=$(($(number 'full 4' reduced) - $(number 'merged full 4' reduced)))
    [ $saved = 49152 ] || fail "one gradient of wte saved $saved bytes"
    # NCCL's order and 16 bits: other bits, similar losses. A rank passes NCCL its block of the sum in 2 bytes
    # per element. In tree order it sends three blocks in 4 bytes, and some bytes of the norm and of padding.
    cuda any $short --ranks 4 --order any --reduce-dtype bf16
    near any one
    [ "$(hash_of any)" != "$(hash_of one)" ] || fail "--order any --reduce-dtype bf16 changed nothing"
    norm=$(($(number 'merged full 4' reduced) - 6 * $(number any reduced)))
    [ "$(number any reduced)" -gt 10000 ] && [ $norm -ge 0 ] && [ $norm -lt 8000 ] ||
        fail "$(number any reduced) bytes were reduced in bf16, $(number 'merged full 4' reduced) in the tree"
    # A table of the tuner, for all kinds of products of a step. On the fake GPU all algorithms take the same time,
    # and the first one wins. The second table has another one for each product, and a part for each of two GPUs:
    # other bits, the same ones on both. An algorithm has its number in the third last word.
    "$folder/gpt_tests" bench_gpt --tune table --layers 1 --heads 2 --channels 32 --vocab 256 --batch 2 --length 16 > tuner.all 2>&1 ||
        fail "bench_gpt --tune: $(cat tuner.all)"
    [ "$(grep -c '"best_us"' tuner.all) $(tail -n 1 table)" = "15 end 15" ] || fail "bench_gpt --tune: $(cat tuner.all table)"
    cuda tuned $short --gemm-table table
    same_hash one tuned
    grep -q "table: algorithms for 15 products on this GPU" tuned.out || fail "$(cat tuned.out)"
    {
        head -n 1 table
        for gpu in 0 1; do
            sed -e 1d -e '$d' -e "s/^chip .*/chip Fake $gpu/" table
        done | sed 's/ 0\{16\} 0\{16\} 0\{16\}$/ 0000000000000001 0000000000000000 0000000000000000/'
        echo "end 30"
    } > second
    cuda second $short --gemm-table second
    cuda second2 $short --gemm-table second --ranks 2 --strategy full
    near second one
    same_hash second second2
    [ "$(hash_of second)" != "$(hash_of one)" ] || fail "--gemm-table changed nothing"
    cuda stages $short --stages 2 --reduce-dtype bf16 --timeline stages.json
    cuda mesh $short --stages 2 --ranks 4 --strategy grad --schedule GPipe --profile
    same_hash one stages
    same_hash one mesh
    # f16 with a loss scale that is too large: the first batch is skipped, with the same result in every run. A
    # folder stores the scale, so that a run that resumes it skips none, whatever --loss-scale.
    cuda f16 $short --dtype f16 --tied-grads merged
    near f16 one
    cuda over $short --dtype f16 --loss-scale 131072 --checkpoint f16/
    skips=$(grep overflowed over.all)
    [ "$skips" = "step 1: a gradient overflowed; skipped the batch, loss scale 131072 -> 65536" ] || fail "$(cat over.all)"
    for way in '4 --strategy grad' '2 --strategy optim --offload' '4 --stages 2'; do
        cuda "over $way" $short --dtype f16 --loss-scale 131072 --ranks $way
        same_hash over "over $way"
    done
    cuda "over cut" $short --dtype f16 --loss-scale 131072 --tp 2
    near "over cut" over
    cuda resumed --resume f16.1 --steps 4 --dtype f16 --loss-scale 1048576
    grep -q 'continues after step 3' resumed.out || fail "$(cat resumed.out)"
    same_hash resumed over
    if grep overflowed f16.all resumed.all; then fail "batches were skipped"; fi
    DDP_TEST_GPUS=1
    export DDP_TEST_GPUS
    cuda shared $short --gpus 0,0
    unset DDP_TEST_GPUS
    same_hash one shared
    grep -q '^ranks share a GPU' shared.all || fail "nothing says that ranks share a GPU: $(cat shared.all)"
    if grep 'share a GPU' one.all 'full 2.all'; then fail "no ranks shared a GPU"; fi
    cuda offloaded $short --offload --ranks 2
    cuda streamed $short --offload-params --ranks 2 --strategy full
    same_hash one offloaded
    same_hash one streamed

    train_with whole4 "$trainers/train_gpt" $short --ranks 1
    cuda cut $short --dtype f32 --tp 2
    close cut whole4
    cuda cut_stages $short --dtype f32 --tp 2 --stages 2 --ranks 4
    same_hash cut cut_stages
}
# The memory held is at least half of the estimate, and never more than it.
for name in one 'full 1' 'full plain' 'full 4' 'merged full 4' 'merged optim 2' any 'optim 2' stages cut again f16 'over 4 --stages 2' 'single f32' 'single bf16'; do
    expected=$(sed -n 's/.* of each rank.s GPU: \([0-9.]*\) MiB expected.*/\1/p' "$name.all")
    awk "BEGIN { held = $(number "$name" held) / 1048576; exit !(held <= $expected && held >= $expected / 2) }" ||
        fail "$name: $expected MiB were expected, $(number "$name" held) bytes held"
done
grep -q '^  gather ' mesh.all || fail "no profile: $(cat mesh.all)"
# As bench/gpu/gpt.py reads them, too.
"${PYTHON:-python3}" - "$bench" <<'END' || fail "stages.json, or a profile or table, is not as it should be: $(cat mesh.all)"
import json, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import gpt
text = open("mesh.all").read()
profile = text[text.index(" of rank 0, "):].split("\n\n")[0].split("\n")[1:]
rows = gpt.read_profile(text)
assert len(rows) == len(profile) > 10 and all(line.startswith("  %s " % row[0]) for row, line in zip(rows, profile))
assert gpt.read_table(text)["strategy"] == "grad"
assert len(gpt.read_timeline(json.load(open("stages.json"))["traceEvents"])["host_ms"]) == 3
events = [e for e in json.load(open("stages.json"))["traceEvents"] if e["ph"] == "X"]
assert {e["pid"] for e in events} == {0, 1} and {e["tid"] for e in events} == {0, 1} and {e["args"]["step"] for e in events} == {2, 3, 4}
assert any(e["name"] == "read the step before" for e in events) and all(e["dur"] >= 0 for e in events)
END
rm stages.json

# --- a GPU that is too small, except with --offload ---

# shellcheck disable=SC2086
{
    short="$run --channels 96 --steps 2"
    cuda large $short
    needed=$("$program" --threads-as-ranks $short --offload --memory-limit 1 text 2>&1 | sed -n 's/.* 1 rank(s) need \([0-9]*\).*/\1/p')
    mib=$((needed + 1))
    before=$(state)
    wrong "use --recompute, --offload, --offload-params or a smaller --micro-batch" $short --threads-as-ranks --memory-limit $mib text
    cuda limited $short --offload --memory-limit $mib
    same_hash limited large
    cuda streams $short --offload-params --layers 6
    cuda streamed $short --offload --strategy full --layers 6
    same_hash streams streamed
    # 4 layers of 12 x 96 x 96 parameters: 2 bytes each, and 4 of a sum per level
    [ "$(number streams held)" -lt $(($(number streamed held) - 4 * 12 * 96 * 96 * 6)) ] || fail "$(number streams held) bytes were held with --offload-params, $(number streamed held) with --offload"
    [ "$(number large held)" -gt $((mib * 1048576)) ] || fail "$(number large held) bytes were held without a limit of $mib MiB"
    [ "$(number limited held)" -le $((mib * 1048576)) ] || fail "$mib MiB were the limit, $(number limited held) bytes were held"
    before=$(state)
    # Another program takes memory after the free size was queried: the error has the failed call, the
    # estimate, and the flags that lower it.
    for room in 1 $mib; do
        DDP_TEST_ROOM=$room
        export DDP_TEST_ROOM
        for part in "out of memory (cudaErrorMemoryAllocation)" " MiB, without CUDA's graphs and libraries; use --recompute, --offload"; do
            wrong "$part" $short --threads-as-ranks text
        done
        unset DDP_TEST_ROOM
    done
}

# --- checkpoints: files, and folders ---

# shellcheck disable=SC2086
{
    short="$run --steps 4 --dtype f32"
    cuda saved $short --ranks 2 --checkpoint here.ckpt
    cuda saved_folder $short --ranks 2 --stages 2 --checkpoint here/
    cuda saved_cut $short --tp 2 --tied-grads merged --checkpoint cut/
    train_with saved_whole "$trainers/train_gpt" $run --steps 4 --ranks 1 --checkpoint whole.ckpt
    train_with end "$trainers/train_gpt" --resume whole.ckpt --steps 6 --ranks 1
    train_with end_here "$trainers/train_gpt" --resume here.ckpt --steps 6 --ranks 1
    train_with end_folder "$trainers/train_gpt_fsdp" --resume here --steps 6 --ranks 2
    train_with end_cut "$trainers/train_gpt_3d" --resume cut --steps 6 --tp 2 --ranks 2
    train_with made "$trainers/train_gpt_fsdp" $run --steps 4 --ranks 1 --checkpoint made
    train_with made_cut "$trainers/train_gpt_3d" $run --steps 4 --ranks 2 --tp 2 --checkpoint made_cut
    cuda from_whole --resume whole.ckpt --steps 6 --dtype f32 --ranks 2 --strategy optim
    cuda from_here --resume here.ckpt --steps 6 --dtype f32 --stages 2
    cuda from_folder --resume here --steps 6 --dtype f32
    cuda from_made --resume made --steps 6 --dtype f32 --ranks 2 --tied-grads merged
    cuda from_cut --resume made_cut --steps 6 --dtype f32 --tp 2
    for name in end_here end_folder end_cut from_whole from_here from_folder from_made from_cut; do
        grep -q 'continues after step 4' "$name.out" || fail "$name does not report where it continues"
        close $name end
    done
    same_hash from_here from_folder
}

# --- files of llm.c ---

"$folder/llmc" --model first.bin --vocab 256 --layers 2 --heads 2 --channels 32 --context 16 --seed 7 > llmc.out || fail "$(cat llmc.out)"
"$program" --write-random random.bin --layers 1 --heads 1 --channels 8 --context 8 > random.out 2>&1 || fail "$(cat random.out)"
"$folder/llmc" --tokens tokens.bin --count 200 > llmc.out || fail "$(cat llmc.out)"
cuda first --init first.bin --micro-batch 2 --batch 8 --lr 0.01 --seed 7 --steps 4 --strategy none
same_hash one first
mv text text.kept
cp tokens.bin text
cuda tokens --init random.bin --micro-batch 1 --batch 1 --steps 1
grep -q '200 tokens of text' tokens.all || fail "$(cat tokens.all)"
rm text
mkdir text # of shards: these tokens, none, and 200 MB of holes, which stay where they are
cp tokens.bin text/b.bin
for shard in a c; do dd if=tokens.bin of=text/$shard.bin bs=1024 count=1 2> dd.err; done
printf '\000\000\000\000' | dd of=text/a.bin bs=4 seek=2 conv=notrunc 2> dd.err
printf '\000\341\365\005' | dd of=text/c.bin bs=4 seek=2 conv=notrunc 2> dd.err
truncate -s 200001024 text/c.bin
cuda stream --init random.bin --micro-batch 1 --batch 1 --steps 1
grep -q '100000200 tokens of text' stream.all || fail "$(cat stream.all)"
[ $(($(number stream resident) - $(number tokens resident))) -lt 65536 ] ||
    fail "$(number stream resident) KiB with large shards, $(number tokens resident) without"

# A machine with other shards than that of rank 0. Rank 0 reports it.
mkdir other same same/text
cp tokens.bin other/text
ln text/a.bin text/c.bin same/text
{ head -c 1222 text/b.bin; printf '\001\001'; tail -c 200 text/b.bin; } > same/text/b.bin
before=$(state)
for elsewhere in . other same; do
    # shellcheck disable=SC2016
    "$folder/with_port" sh -c 'export MASTER_ADDR=127.0.0.1 MASTER_PORT=$DDP_TEST_PORT WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0
        (cd "$1" && RANK=1 LOCAL_RANK=1 exec timeout 60 "$2" --init "$3/random.bin" --micro-batch 1 --batch 2 $5) > rank1.out 2>&1 &
        RANK=0 LOCAL_RANK=0 timeout 60 "$2" --init "$3/random.bin" --micro-batch 1 --batch 2 $4 > rank0.out 2> rank0.err
        status=$?; wait $!; echo $((status + $?)) > status' sh $elsewhere "$program" "$work" text "$([ $elsewhere = . ] && echo missing || echo text)"
    what='token shards of (0|200) tokens, but rank 0 of 100000200'
    [ $elsewhere != same ] || what='other tokens in its shards than rank 0'
    grep -Eq "^train_gpt_cuda: rank 1 has $what; give the same shards at" rank0.err ||
        fail "rank 1 with other shards: $(cat rank0.err rank1.out)"
    [ "$(cat status) $(wc -l < rank0.err) $(wc -c < rank1.out)" = "2 1 0" ] || fail "rank 1 with other shards: status $(cat status): $(cat rank0.err rank1.out)"
    rm rank0.out rank0.err rank1.out status
done
[ "$(state)" = "$before" ] || fail "rank 1 with other shards: files changed"
rm -r text other same
mv text.kept text

# A shard that changes during training: each rank returns the error of the rank that reads it.
mkdir shards
cp tokens.bin shards/a.bin
for ranks in 2 "4 --stages 2"; do
    cp tokens.bin shards/b.bin
    rm -f changes.out
    # shellcheck disable=SC2086
    timeout 60 "$program" --threads-as-ranks --init random.bin --micro-batch 1 --batch 4 --steps 1000000 --ranks $ranks shards > changes.out 2> changes.err &
    until grep -qs '^step ' changes.out || ! kill -0 $! 2> kill.err; do sleep 0.1; done
    case $ranks in
    2) what='shards/b.bin: token [0-9]* is 65535, but the vocabulary has 50257'
        { head -c 1024 tokens.bin; head -c 400 /dev/zero | tr '\000' '\377'; } > new
        mv new shards/b.bin ;;
    *) what='shards/b.bin: No such file'; rm shards/b.bin ;;
    esac
    status=0
    wait $! || status=$?
    if [ $status != 1 ] || ! grep -Eq "^train_gpt_cuda: .*rank [0-3]: sample [0-9]*: $what" changes.err; then
        fail "a shard that changed, $ranks ranks: status $status: $(cat changes.err)"
    fi
done
rm -r shards

mkfifo pipe # nothing of it is lost
cat text > pipe &
# shellcheck disable=SC2086
timeout 60 "$program" $run --steps 1 --threads-as-ranks pipe > piped.all 2>&1 || fail "$(cat piped.all)"
rm pipe
grep -q "$(wc -c < text) bytes of text" piped.all || fail "$(cat piped.all)"

# --- wrong input ---

before=$(state)
# shellcheck disable=SC2086
{
    short="$run --steps 2 --threads-as-ranks"
    wrong "use full, grad, optim or none" $short --strategy zero text
    wrong "use --strategy full and leave out --stages" $short --offload-params --strategy grad text
    wrong "use bf16, f16 or f32" $short --dtype f64 text
    wrong "use bf16, or --dtype f16" $short --reduce-dtype f16 text
    wrong "use a folder: --checkpoint new/" $short --dtype f16 --checkpoint new text
    wrong "needs --dtype f16; leave it out" $short --loss-scale 1024 text
    wrong "use a power of two" $short --dtype f16 --loss-scale 1000 text
    wrong "files of llm.c are bf16 or f32" --dtype f16 --write-random new
    wrong "use tree or any" $short --order ring text
    wrong "use f32, bf16 or f16" $short --reduce-dtype f64 text
    wrong "use separate or merged" $short --tied-grads both text
    wrong "with --stages 2 embedding and head are on different ranks" $short --tied-grads merged --stages 2 text
    wrong "such as 0,2" $short --gpus first text
    wrong "put commas between devices: --gpus 0,2" $short --gpus 0 2 text
    wrong "device 9 does not exist" $short --gpus 9 text
    wrong "is too small: 1 rank(s) need " $short --memory-limit 1 text
    wrong "but 1.0 MiB are available; use --recompute, --offload, --offload-params or a smaller --micro-batch" $short --memory-limit 1 text
    wrong "is too small: 2 rank(s) need " $short --gpus 0,0 --memory-limit 1 text
    wrong "use --ranks 6" $short --stages 3 --ranks 4 text
    wrong "use --layers 5 or more" $short --stages 7 text
    wrong "use 1F1B, GPipe or naive" $short --schedule ZB-H1 text
    wrong "is not a schedule" $short --schedule fast text
    wrong "--stages 9 x --tp 9 are 81 ranks, and there are 1; start as many under torchrun, or use 64 at most" $short --stages 9 --tp 9 text
    wrong "multiple of 8" $short --channels 36 text
    wrong "No such file" $short --init missing text
    wrong "not a checkpoint of llm.c" $short --init text text
    wrong "leave --layers out" $short --init random.bin text
    wrong "has a vocabulary of 50257" --init random.bin --threads-as-ranks text
    wrong "leave one of them out" $short --init first.bin --resume here text
    wrong "cannot be written" $short --checkpoint missing/file text
    wrong "cannot be written" $short --checkpoint missing/folder/ text
    wrong "cannot be written" $short --timeline missing/file text
    wrong "missing/table: No such file" $short --gemm-table missing/table text
    wrong "line 1: the first line is not ddp_cuda_gemm 1; write the table again" $short --gemm-table text text
    wrong "was trained with --layers 2, not 3" --resume here --layers 3 text
    wrong "not a checkpoint" --resume text text
    wrong "cannot be written" --write-random missing/file
    wrong "pass only shards, or only text" --threads-as-ranks tokens.bin text
    wrong "pass only shards, or only text" --threads-as-ranks text tokens.bin
    mkdir both
    cp tokens.bin text both
    before=$(state)
    wrong "both/text is not a token shard" --threads-as-ranks both
    rm -r both
    before=$(state)
    wrong "in one tensor, but this run needs separate tensors; use --tp 1, or go on with train_gpt_fsdp" --resume here --tp 2 --threads-as-ranks text
    wrong "in separate tensors, but this run needs one tensor; use --tp 2 or more, or go on with train_gpt_3d" --resume cut --threads-as-ranks text
    wrong "in separate tensors, but this run needs one tensor" --resume made_cut --stages 2 --threads-as-ranks text
    wrong "token shard" --resume here.ckpt --threads-as-ranks tokens.bin
    DDP_TEST_GPUS=0 wrong "device 0 (the local rank) does not exist" $short text
}
echo "train_gpt_cuda: every way has the losses of train_gpt and ends with the same weights: $(hash_of one)"
