#!/bin/sh
# Measures how training scales over ranks: examples/train_mlp.c and examples/gpt/train_gpt.c, in turns with the same
# models under PyTorch DDP over Gloo (peer_scaling_torch.py), if $PYTHON (python3) has PyTorch.
#
#   sh bench/scaling.sh                1, 2, 4 ... ranks up to twice the cores, 5 rounds
#   sh bench/scaling.sh --ranks "1 2"  these ranks, powers of two from 1 on
#   sh bench/scaling.sh --rounds N
#   sh bench/scaling.sh --epochs N     of train_mlp in a run; 12 by default
#   sh bench/scaling.sh --steps N      of train_gpt in a run; 12 by default
#   sh bench/scaling.sh --out DIR      results go to DIR instead of bench/results/last
#
#   strong     a global batch of 256 images or 8 sequences, on any number of ranks
#   weak       as many images or sequences for each rank
#   efficiency speed / (speed of 1 rank * ranks); ranks that share cores count as their cores
#
# More than 4 ranks get a larger strong batch: 64 images and 2 sequences per rank.
# $CORES: the cores to count; nproc by default. Writes scaling.csv (one line per run), scaling.md (medians), scaling.dat
# and, with gnuplot, scaling.svg. others_percent: the share of the cores that other programs had during a run.
set -u
here=$(cd "$(dirname "$0")" && pwd)
examples=$here/../examples
out=$here/results/last
cores=${CORES:-$(nproc)}
python=${PYTHON:-python3}
ranks= rounds=5 epochs=12 steps=12
while [ $# -gt 0 ]; do
    case $1 in
        --ranks | --rounds | --epochs | --steps | --out) ;;
        *) echo "scaling: unknown argument $1 (--ranks \"1 2\", --rounds N, --epochs N, --steps N, --out DIR)" >&2; exit 1 ;;
    esac
    [ $# -gt 1 ] || { echo "scaling: $1 needs a value" >&2; exit 1; }
    case $1 in
        --ranks) ranks=$2 ;;
        --rounds) rounds=$2 ;;
        --epochs) epochs=$2 ;;
        --steps) steps=$2 ;;
        --out) out=$2 ;;
    esac
    shift 2
done
if [ -z "$ranks" ]; then
    ranks=1 next=2
    while [ $next -le $((2 * cores)) ]; do ranks="$ranks $next" next=$((2 * next)); done
fi
most=0 expected=1
for n in $ranks; do
    [ "$n" = $expected ] || { echo "scaling: --ranks \"$ranks\"; use powers of two from 1 on, such as \"1 2 4\"" >&2; exit 1; }
    most=$n expected=$((2 * expected))
done
for number in "$rounds" "$epochs" "$steps"; do
    case $number in
        "" | *[!0-9]*) echo "scaling: $number is not a number" >&2; exit 1 ;;
    esac
done
[ "$rounds" -ge 1 ] && [ "$epochs" -ge 2 ] && [ "$steps" -ge 2 ] || { echo "scaling: use 1 round, 2 epochs and 2 steps or more" >&2; exit 1; }
base=4 # micro-batches of a strong batch: at least one per rank
[ "$most" -le 4 ] || base=$most

build=$(mktemp -d) || exit 1
trap 'rm -rf "$build"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
fail() { echo "scaling: $*" >&2; exit 1; }

# --- build ---

compile() { # source, program
    ${CC:-cc} -O3 -march=native -std=gnu11 -I"$examples" "$1" -o "$2" -lpthread -lm || fail "$1 does not compile"
}

# train_mlp with $1 micro-batches per step, $epochs epochs, and times in microseconds
build_mlp() {
    [ ! -f "$build/mlp_$1" ] || return 0
    sed -e "s/BATCH = 4 \* MICRO, EPOCHS = 4,/BATCH = $1 * MICRO, EPOCHS = $epochs,/" -e 's/%\.1f s\\n/%.6f s\\n/' \
        -e "s|#include \"\.\./|#include \"$here/../|" "$examples/train_mlp.c" >"$build/mlp_$1.c"
    grep -q "BATCH = $1 \* MICRO, EPOCHS = $epochs," "$build/mlp_$1.c" && grep -q '%\.6f s\\n' "$build/mlp_$1.c" \
        && grep -q 'mnist_synthetic(4096, 1024,' "$build/mlp_$1.c" || fail "train_mlp.c has changed: adapt build_mlp and peer_scaling_torch.py"
    compile "$build/mlp_$1.c" "$build/mlp_$1"
}
compile "$examples/gpt/train_gpt.c" "$build/train_gpt"
for n in $ranks; do
    build_mlp $base
    build_mlp $((base * n))
done
torch=0
if $python -c "import torch.distributed" 2>/dev/null; then torch=1; else echo "scaling: $python has no PyTorch: left out"; fi

# --- runs ---

# The images/s of the median epoch, without the first; the tokens/s of all steps.
mlp_speed() { awk '/^epoch / { now = $(NF - 1); if (n++) print now - last; last = now }' | sort -n | awk '{ t[NR] = $1 } END { if (NR) print 4096 / t[int((NR + 1) / 2)] }'; }
gpt_speed() { awk '/tokens\/s   waiting/ { getline; print $2 }'; }

run_ddp() { # model, ranks, micro-batches
    if [ "$1" = mlp ]; then
        "$build/mlp_$3" "$2" >"$build/log" 2>&1 || return 1
        mlp_speed <"$build/log"
    else
        (cd "$build" && ./train_gpt --ranks "$2" --layers 4 --heads 4 --channels 256 --context 256 --batch $((2 * $3)) --micro-batch 2 \
            --steps "$steps" "$here/../ddp.h") >"$build/log" 2>&1 || return 1
        gpt_speed <"$build/log"
    fi
}
run_torch() {
    if [ "$1" = mlp ]; then batch=$((64 * $3)) count=$epochs; else batch=$((2 * $3)) count=$steps; fi
    $python "$here/peer_scaling_torch.py" "$1" --ranks "$2" --batch $batch --count "$count" >"$build/log" 2>&1 || return 1
    awk '/^(images|tokens)\/s/ { print $2 }' "$build/log"
}

# Stores in $1: seconds since the start of the machine; processor seconds of all programs, and of this script's.
clocks() {
    times >"$build/times" # of this shell, then of its children
    awk -v hz="$(getconf CLK_TCK)" '
        FILENAME == "/proc/uptime" { wall = $1 }
        FILENAME == "/proc/stat" && $1 == "cpu" { all = ($2 + $3 + $4 + $7 + $8 + $9) / hz }
        FILENAME ~ /times$/ { for (i = 1; i <= 2; i++) { split($i, t, /[ms]/); own += 60 * t[1] + t[2] } }
        END { print wall, all, own }' /proc/uptime /proc/stat "$build/times" >"$1"
}
# The share of the cores that other programs had between two such moments, in %.
others() { awk -v cores="$cores" 'NR == 1 { wall = $1; all = $2; own = $3 } NR == 2 { used = ($2 - all) - ($3 - own); printf "%.1f\n", 100 * (used > 0 ? used : 0) / (($1 - wall + 0.001) * cores) }' "$build/before" "$build/after"; }

csv=$out/scaling.csv
rm -f "$out/scaling.md" "$out/scaling.dat"
echo "model,scaling,ranks,system,round,per_second,others_percent" >"$csv"
measure() { # model, scaling, ranks, micro-batches, round
    for system in ddp torch; do
        [ $system = ddp ] || [ $torch = 1 ] || continue
        clocks "$build/before"
        speed=$(run_$system "$1" "$3" "$4")
        clocks "$build/after"
        case $speed in
            [0-9]*) echo "$1,$2,$3,$system,$5,$speed,$(others)" >>"$csv" ;;
            *) tail -3 "$build/log" >&2; fail "$1, $3 ranks, $system: no speed in the output" ;;
        esac
    done
}
round=1
while [ $round -le "$rounds" ]; do
    echo "scaling: round $round of $rounds"
    for model in mlp gpt; do
        for n in $ranks; do
            measure $model strong "$n" $base $round
            [ "$n" = 1 ] || measure $model weak "$n" $((base * n)) $round
        done
    done
    round=$((round + 1))
done

# --- tables and plot ---

awk -F , -v cores="$cores" -v base=$base -v ranks="$ranks" -v rounds="$rounds" -v dat="$out/scaling.dat" '
function median(key,   n, i, j, t, v) {
    n = split(speeds[key], v, " ")
    for (i = 2; i <= n; i++) for (j = i; j > 1 && v[j - 1] + 0 > v[j] + 0; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
    return n % 2 ? v[(n + 1) / 2] + 0 : (v[n / 2] + v[n / 2 + 1]) / 2
}
function spread(key,   n, i, v, low, high) {
    n = split(speeds[key], v, " ")
    for (i = 1; i <= n; i++) { if (i == 1 || v[i] + 0 < low) low = v[i] + 0; if (v[i] + 0 > high) high = v[i] + 0 }
    return sprintf("%.0f to %.0f", low, high)
}
function efficiency(who, key,   used) {
    used = key_ranks < cores ? key_ranks : cores
    return 100 * median(key) / (median(model SUBSEP "strong" SUBSEP 1 SUBSEP who) * used)
}
function cells(who,   key) {
    key = model SUBSEP scaling SUBSEP key_ranks SUBSEP who
    if (!(key in speeds)) { percent[who] = "NaN"; return " | |" }
    percent[who] = sprintf("%.1f", efficiency(who, key))
    return sprintf(" %.0f (%s) | %s%% |", median(key), spread(key), percent[who])
}
NR > 1 { key = $1 SUBSEP $2 SUBSEP $3 SUBSEP $4; speeds[key] = speeds[key] " " $6; speeds["others"] = speeds["others"] " " $7 }
END {
    split("mlp gpt", models, " ")
    split("images tokens", units, " ")
    split("64 2", per_micro, " ")
    split("images sequences", rows, " ")
    count = split(ranks, list, " ")
    printf "%d cores, medians of %d runs (lowest to highest). ", cores, rounds
    printf "Other programs used %.0f%% of the cores in the median run (%s%%).\n", median("others"), spread("others")
    for (m = 1; m <= 2; m++) {
        model = models[m]
        printf "\n| train_%s | ranks | %s per step | ddp, %s/s | efficiency | PyTorch, %s/s | efficiency | ddp / PyTorch |\n", model, rows[m], units[m], units[m]
        print "|---|---|---|---|---|---|---|---|"
        if (m == 2) printf "\n\n" >dat # index 1 of the plot
        for (s = 0; s <= 1; s++)
            for (i = s + 1; i <= count; i++) {
                scaling = s ? "weak" : "strong"
                key_ranks = list[i] + 0
                name = key_ranks > cores ? key_ranks " on " cores " cores" : key_ranks ""
                line = "| " scaling " | " name " | " per_micro[m] * base * (s ? key_ranks : 1) " |" cells("ddp") cells("torch")
                ours = model SUBSEP scaling SUBSEP key_ranks SUBSEP "ddp"
                theirs = model SUBSEP scaling SUBSEP key_ranks SUBSEP "torch"
                print line " " (theirs in speeds ? sprintf("%.2f", median(ours) / median(theirs)) : "") " |"
                if (i > 1) printf "\"%s, %s\" %s %s\n", scaling, name, percent["ddp"], percent["torch"] >dat
            }
    }
}' "$csv" >"$out/scaling.md" || exit 1
cat "$out/scaling.md"
if [ "$most" -gt 1 ] && command -v gnuplot >/dev/null; then
    if (cd "$out" && gnuplot "$here/plot_scaling.gp") >"$build/log" 2>&1; then echo "scaling: wrote $out/scaling.svg"; else cat "$build/log"; fi
fi
