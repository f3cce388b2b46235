#!/bin/sh
# The trainer on shards prints the losses of train_gpt and ends with its weights, bit for bit: every strategy,
# on 1, 2, 3 and 4 ranks, as processes and as threads, resumed on other ranks with another strategy, and after
# a kill. With 16-bit parameters the bits are the same on any ranks. Invalid input is one sentence.
# usage: train_gpt_fsdp.sh path/of/train_gpt_fsdp, with train_gpt of the same flavour in the same folder
. "$(dirname "$0")/../support/train_gpt.sh"
whole=$(dirname "$program")/$(basename "$program" | sed 's/_fsdp//')

seq 1 300 > text # short: the run goes through several epochs
run="--layers 1 --heads 2 --channels 16 --context 16 --micro-batch 2 --lr 0.01 --seed 7"

tables='/^  strategy/,/^$/d; /^  bytes of rank 0/,/^$/d; /^  ranks  /,/^$/d'

# --- every strategy on every number of ranks ---

# shellcheck disable=SC2086
{
    train_with eight "$whole" $run --batch 8 --steps 60 --ranks 1
    train_with six "$whole" $run --batch 6 --steps 8 --ranks 1
    [ "$(grep -c 'gradient norm' eight.same)" -ge 20 ] || fail "not every twentieth step printed its loss"
    [ "$(grep -c ^ six.same)" -gt 20 ] || fail "nothing is left to compare"
    for strategy in full grad optim none; do
        train_with ${strategy}1 "$program" $run --batch 8 --steps 60 --ranks 1 --strategy $strategy
        train_with ${strategy}2 "$program" $run --batch 8 --steps 60 --ranks 2 --strategy $strategy
        train_with ${strategy}3 "$program" $run --batch 6 --steps 8 --ranks 3 --strategy $strategy --threads-as-ranks
        train_with ${strategy}4 "$program" $run --batch 8 --steps 60 --ranks 4 --strategy $strategy --threads-as-ranks
        same eight ${strategy}1
        same eight ${strategy}2
        same six ${strategy}3
        same eight ${strategy}4
    done
    train_with hybrid "$program" $run --batch 8 --steps 60 --ranks 4 --replicas 2
    same eight hybrid
    for offload in file params; do
        train_with $offload "$program" $run --batch 8 --steps 60 --ranks 2 --offload $offload
        same eight $offload
    done
    # A unit that was released is gathered again before its forward runs again.
    train_with deep "$whole" $run --layers 3 --batch 8 --steps 6 --ranks 1
    for strategy in full grad none; do
        train_with deep_$strategy "$program" $run --layers 3 --batch 8 --steps 6 --ranks 2 --strategy $strategy --recompute
        same deep deep_$strategy
    done
}

# Sharding over four ranks leaves a quarter, plus the rounding to rows and cache lines.
peak() { sed -n "s/^  $2 *[0-9]* *\([0-9]*\).*/\1/p" "$1.all"; }
[ "$(peak full4 shards)" -lt $(($(peak none4 shards) / 3)) ] || fail "shards: $(peak full4 shards) of $(peak none4 shards) bytes"
[ "$(peak optim4 optimizer)" -lt $(($(peak none4 optimizer) / 3)) ] || fail "optimizer: $(peak optim4 optimizer) of $(peak none4 optimizer) bytes"

# --- dropout: the bits of train_gpt, also after a checkpoint, which stores the probability ---

# shellcheck disable=SC2086
{
    train_with drop "$whole" $run --batch 8 --steps 12 --ranks 1 --dropout 0.3
    train_with drop4 "$program" $run --batch 8 --steps 12 --ranks 4 --threads-as-ranks --dropout 0.3 --recompute
    train_with drop_half "$program" $run --batch 8 --steps 6 --lr-decay-steps 12 --ranks 2 --strategy none --dropout 0.3 --checkpoint drop
    train_with drop_rest "$program" --resume drop --steps 12 --ranks 2 --strategy grad
    same drop drop4
    [ "$(hash_of drop_rest)" = "$(hash_of drop)" ] || fail "dropout resumed: $(hash_of drop_rest), uninterrupted $(hash_of drop)"
    rm -r drop drop.1
}

# --- 16-bit parameters: half the bytes, f32 checkpoints, other bits than f32 but the same on any ranks ---

half="--batch 8 --lr-decay-steps 12"
# shellcheck disable=SC2086
{
    train_with half_full1 "$program" $run $half --steps 12 --ranks 1 --param-dtype bf16
    train_with half_grad4 "$program" $run $half --steps 12 --ranks 4 --param-dtype bf16 --strategy grad --threads-as-ranks
    train_with half_optim2 "$program" $run $half --steps 12 --ranks 2 --param-dtype bf16 --strategy optim --recompute
    for name in half_grad4 half_optim2; do same half_full1 $name; done
    train_with half_f32 "$program" $run $half --steps 12 --ranks 2
    train_with half_f16 "$program" $run $half --steps 12 --ranks 2 --param-dtype f16
    close half_full1 half_f32 0.01
    close half_f16 half_f32 0.002
    train_with half_saved "$program" $run $half --steps 6 --ranks 2 --param-dtype bf16 --checkpoint half
    train_with half_rest "$program" --resume half --steps 12 --ranks 1 --param-dtype bf16
    [ "$(hash_of half_rest)" = "$(hash_of half_full1)" ] || fail "bf16 resumed: $(hash_of half_rest), uninterrupted $(hash_of half_full1)"
    train_with half_wide "$program" --resume half --steps 12 --ranks 2
    rm -r half half.1
}
[ "$(sort -u half_full1.out half_f32.out half_f16.out half_wide.out | grep -c '^weights hash')" -eq 4 ] || fail "dtypes have the same hash: $(hash_of half_f16)"
gathered() { sed -n 's/^  gathered *[0-9]* *\([0-9]*\).*/\1/p' "$1.all"; }
[ $((2 * $(gathered half_f16))) -eq "$(gathered half_f32)" ] || fail "gathered: $(gathered half_f16) bytes of f16, $(gathered half_f32) of f32"

# --- checkpoints: the end, the validation before it, and one left by a kill ---

# shellcheck disable=SC2086
{
    train_with saved "$program" $run --batch 8 --steps 60 --ranks 2 --checkpoint here
    same eight saved
    # Omitted flags come from the checkpoint.
    train_with one "$program" --resume here.1 --ranks 1 --strategy none --export one.safetensors
    train_with four "$program" --resume here.1 --ranks 4 --threads-as-ranks --checkpoint there --export four.safetensors
    # An export is the only file of the model in a checkpoint.
    for name in one four; do
        cmp $name.safetensors here/model-00001-of-00001.safetensors || fail "$name exports another model"
        rm $name.safetensors
    done
    train_with hybrid "$program" --resume here.1 --ranks 4 --replicas 2 --strategy grad
    train_with end "$program" --resume there --ranks 2 --strategy optim
    for name in one four hybrid end; do
        grep -q 'continues after step' $name.out || fail "$name does not report where it continues"
        [ "$(hash_of $name)" = "$(hash_of eight)" ] || fail "$name: resumed $(hash_of $name), uninterrupted $(hash_of eight)"
    done

    # The learning rate is that of --lr-decay-steps, also in a run that stops earlier and is continued.
    train_with early "$program" $run --batch 8 --steps 50 --lr-decay-steps 60 --ranks 2 --checkpoint early
    train_with late "$program" --resume early --steps 60 --ranks 1
    [ "$(hash_of late)" = "$(hash_of eight)" ] || fail "stopped at step 50 and resumed: $(hash_of late), uninterrupted $(hash_of eight)"

    train_with uncut "$whole" $run --batch 8 --steps 400 --ranks 1
    "$program" $run --batch 8 --steps 400 --ranks 1 --strategy grad --checkpoint killed text > killed.out 2> killed.err &
    pid=$!
    tries=0
    while [ ! -e killed/state.json ]; do
        kill -0 $pid 2> /dev/null || fail "the run ended without a checkpoint: $(cat killed.err)"
        tries=$((tries + 1))
        [ $tries -lt $((limit * 100)) ] || fail "no checkpoint after $limit s"
        sleep 0.01
    done
    kill -9 $pid
    wait $pid 2> /dev/null
    train_with again "$program" --resume killed --ranks 2 --checkpoint killed
    [ "$(hash_of again)" = "$(hash_of uncut)" ] || fail "after a kill: $(hash_of again), uninterrupted $(hash_of uncut)"
}

# --- wrong input ---

mkdir other
echo note > other/note
echo other > words
cp -r here damaged
cp -r here apart
sed -i 's/[.]attn[.]qkv[.]weight"/.attn.q.weight"/' apart/model.safetensors.index.json
data=$(find damaged -name 'model-*.safetensors')
printf 'damage' | dd of="$data" bs=1 seek=$(($(wc -c < "$data") - 64)) conv=notrunc 2> dd.log || fail "$(cat dd.log)"
rm dd.log
cp -r here older
echo '{"format": "another"}' > older/state.json
before=$(state)

# shellcheck disable=SC2086
for ranks in 1 2; do
    small="$run --batch 8 --steps 2 --ranks $ranks"
    wrong "give full, grad, optim or none" $small --strategy zero text
    wrong "--param-dtype bf8: give f32, bf16 or f16" $small --param-dtype bf8 text
    wrong "--offload disk: give none, file or params" $small --offload disk text
    wrong "use --strategy full" $small --offload params --strategy grad text
    wrong "it is not a folder" $small --checkpoint text text
    wrong "No such file" $small --checkpoint missing/new text
    wrong "holds other files" $small --checkpoint other text
    wrong "missing/new cannot be written: No such file" $small --export missing/new text
    wrong "other cannot be written: it is not a regular file" $small --export other text
    wrong "No such file" $small --resume missing text
    wrong "not a checkpoint of train_gpt_fsdp" --ranks $ranks --resume older text
    wrong "use train_gpt_3d" --ranks $ranks --resume apart text
    wrong "checksum" --ranks $ranks --resume damaged text
    wrong "was trained with --layers 1, not 2" --ranks $ranks --layers 2 --resume here text
    wrong "other text" --ranks $ranks --resume here text words
    wrong "use --steps 60 or more" --ranks $ranks --steps 8 --resume here text
done
# shellcheck disable=SC2086
{
    wrong "--replicas 2 does not divide 3 ranks" $run --ranks 3 --replicas 2 text
    wrong "splits the model over 3 ranks" $run --ranks 6 --replicas 2 text
    wrong "does not split into one micro-batch of 2 on each of 3 ranks; use --batch 6" $run --ranks 3 --batch 12 text
    wrong "does not split into micro-batches of 2 on each of 2 ranks; use --batch 8" $run --ranks 2 --batch 7 text
    wrong "1, 2, 4, 8 ... micro-batches of 2 on each of 2 ranks; use --batch 8" $run --ranks 2 --strategy optim --batch 12 text
}
echo "train_gpt_fsdp: every strategy has the bits of train_gpt: $(hash_of eight)"
