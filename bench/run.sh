#!/bin/sh
# Measures ddp's collectives in turns with Open MPI, MPICH and Gloo, if installed, and with bare loops over memory.
#
#   sh bench/run.sh            everything, under 8 minutes
#   sh bench/run.sh --quick    all_reduce with two ranks against Open MPI, under 90 seconds
#   sh bench/run.sh --fsdp     a step under each strategy of ddp_fsdp.h, under 2 minutes
#   sh bench/run.sh --pipeline schedules of ddp_pipeline.h against their simulation, under 6 minutes
#   sh bench/run.sh --tensor   a transformer block over 1, 2 and 4 tensor ranks, under 2 minutes
#   sh bench/run.sh --optimizer  optimizer steps against bare loops over the same memory, under a minute
#   sh bench/run.sh --loader   samples per second of ddp_loader and waits of steps, under 2 minutes; the same with
#                              PyTorch's DataLoader if $PYTHON (python3) has PyTorch
#   sh bench/run.sh --hooks    a bucket under each hook of examples/extras/comm_hooks.h against the plain all-reduce, under
#                              a minute
#   sh bench/run.sh --out DIR  results go to DIR instead of bench/results/last
#   sh bench/run.sh --two SECONDS --four SECONDS    time for the runs with 2 and with 4 ranks; 0 leaves the run out
#
# Writes collectives.csv (one line per block), collectives.md (the tables) and all_reduce.svg. On Debian and Ubuntu the
# peers are openmpi-bin libopenmpi-dev, mpich libmpich-dev and libgloo-dev; the plot needs gnuplot-nox. Method:
# bench/README.md and bench/bench.h.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=$here/results/last
quick=0 part= two= four=
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=1 ;;
        --fsdp | --pipeline | --tensor | --optimizer | --loader | --hooks) part=${1#--} ;;
        --two) two=${2:?--two needs seconds}; shift ;;
        --four) four=${2:?--four needs seconds}; shift ;;
        --out) out=${2:?--out needs a folder}; shift ;;
        *) echo "bench: unknown argument $1 (--quick, --fsdp, --pipeline, --tensor, --optimizer, --loader, --hooks, --out DIR, --two SECONDS, --four SECONDS)" >&2; exit 1 ;;
    esac
    shift
done

build=$(mktemp -d) || exit 1
jobs_started=
leave() { for job in $jobs_started; do kill "$job" 2>/dev/null; done; wait; rm -rf "$build"; }
trap leave EXIT
trap 'exit 130' INT TERM
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)

# --- build; a peer that does not build or start is left out ---

flags="-O3 -march=native -std=gnu11"
# The parts without peers: bench_PART.c prints tables. plot_PART.gp draws PART.dat, which bench_PART.c writes or which
# taken_from_tables extracts from the tables.
measure_part() {
    program=$build/$part data=$out/$part.dat
    case $part in
        fsdp) "$program" 2 61 4 128 "$data" && "$program" 2 21 6 256 "$data" ;;
        pipeline) "$program" waits 8 32 10 5 "$data" && echo && "$program" gpt ;;
        tensor) "$program" 512 8 256 4 15 "$data" && echo && "$program" 128 4 128 4 61 ;;
        loader) "$program" && if ${PYTHON:-python3} -c "import torch" 2>/dev/null; then echo && ${PYTHON:-python3} "$here/peer_loader_torch.py"; fi ;;
        *) "$program" ;;
    esac
}
# One line per bar of the plot: a name and numbers.
taken_from_tables() {
    case $part in
        optimizer) awk -F ' *[|] *' '$5 ~ /GB/ { sub("%", "", $6); print "\"" $2 "\"", $6 }' "$out/$part.md" ;;
        hooks) awk -F ' *[|] *' '$4 ~ / to / { print "\"" $2 "\"", $4 + 0, $6 / 100 }' "$out/$part.md" ;;
        loader) awk -F ' *[|] *' 'BEGIN { n = m = 0 } /: workers/ { peer = $2 ~ /^DataLoader/ } $5 ~ /%/ && !peer { name[n] = $2 " workers, fetches " $5; ddp_ms[n++] = $7 }
                    $5 ~ /%/ && peer { peer_ms[m++] = $7 } END { for (i = 0; i < n; i++) print "\"" name[i] "\"", ddp_ms[i], peer_ms[i] + 0 }' "$out/$part.md" ;;
    esac
}
if [ -n "$part" ]; then
    ${CC:-cc} $flags "$here/bench_$part.c" -o "$build/$part" -lpthread -lm || { echo "bench: bench_$part.c does not compile" >&2; exit 1; }
    rm -f "$out/$part.dat" "$out/$part.md"
    measure_part >"$out/$part.md" || exit 1
    cat "$out/$part.md"
    if [ ! -f "$out/$part.dat" ]; then taken_from_tables >"$out/$part.dat"; fi
    if [ -f "$here/plot_$part.gp" ] && command -v gnuplot >/dev/null; then (cd "$out" && gnuplot "$here/plot_$part.gp") && echo "bench: wrote $out/$part.svg"; fi
    exit 0
fi
${CC:-cc} $flags "$here/bench_collectives.c" -o "$build/ddp" -lpthread -lm || { echo "bench: bench_collectives.c does not compile" >&2; exit 1; }
${CC:-cc} $flags "$here/bench_memory.c" -o "$build/memory" -lpthread || { echo "bench: bench_memory.c does not compile" >&2; exit 1; }
reads=
if "$build/memory" --plan start --setting read; then reads=read; fi

# Debian's names first, then a plain mpicc if it belongs to the right library.
find_mpi() { # library, pattern in the output of `mpirun --version`
    if command -v "mpicc.$1" >/dev/null && command -v "mpirun.$1" >/dev/null; then echo "mpicc.$1 mpirun.$1"; return; fi
    if command -v mpicc >/dev/null && mpirun --version 2>&1 | grep -qi "$2"; then echo "mpicc mpirun"; fi
}
# Large temporary buffers of an MPI library stay allocated instead of being faulted in again, which halves its time.
keep_memory="env MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=67108864"
openmpi= mpich= gloo=
pair=$(find_mpi openmpi "open mpi")
if [ -n "$pair" ] && "${pair% *}" $flags "$here/peer_mpi.c" -o "$build/openmpi" 2>"$build/log"; then
    openmpi="$keep_memory OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ${pair#* } --bind-to none --mca pml ob1 --mca btl self,vader"
    $openmpi --oversubscribe -n 2 "$build/openmpi" --plan start >"$build/log" 2>&1 || { tail -3 "$build/log"; openmpi=; }
fi
if [ $quick = 0 ]; then
    pair=$(find_mpi mpich "hydra\|mpich")
    if [ -n "$pair" ] && "${pair% *}" $flags "$here/peer_mpi.c" -o "$build/mpich" 2>"$build/log"; then
        mpich="$keep_memory UCX_TLS=self,sm ${pair#* }"
        $mpich -n 2 "$build/mpich" --plan start >"$build/log" 2>&1 || { tail -3 "$build/log"; mpich=; }
    fi
    ${CXX:-c++} -O3 -march=native "$here/peer_gloo.cc" -o "$build/gloo" -lgloo -lpthread 2>"$build/log" && gloo="$build/gloo"
    [ -n "$mpich" ] || echo "bench: MPICH is not installed (mpich libmpich-dev) or does not start: left out"
    [ -n "$gloo" ] || echo "bench: Gloo is not installed (libgloo-dev): left out"
fi
[ -n "$openmpi" ] || echo "bench: Open MPI is not installed (openmpi-bin libopenmpi-dev) or does not start: left out"

# --- the programs of a run; the first pass over the list counts them, the second starts them ---

csv=$out/collectives.csv
echo "system,setting,op,memory,ranks,bytes,round,time_s,tag,ping_before_ns,ping_after_ns,median_us,p10_us,p90_us,count,preempted" >"$csv"

program() { # system, setting, command ... (arguments of bench.h may follow the program)
    system=$1 setting=$2
    shift 2
    if [ "$counting" = 1 ]; then slots=$((slots + 1)); return; fi
    "$@" --system "$system" --setting "$setting" --slot "$slot" $common </dev/null &
    jobs_started="$jobs_started $!"
    slot=$((slot + 1))
}

tuned="--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm"
ring="$tuned 5 --mca coll_tuned_allreduce_algorithm_segmentsize 1048576"
eager="$tuned 3 --mca btl_vader_eager_limit 65536"

two_ranks() {
    program ddp - "$build/ddp"
    program memory - "$build/memory"
    for loops in slots-128 slots-512 $reads; do
        program memory $loops "$build/memory" --ops all_reduce,reduce_scatter,reduce_scatter_in_place,all_gather --from 16384 --to 67108864
    done
    program memory slots-8 "$build/memory" --ops all_reduce --from 16384 --to 16384
    program memory slots-256 "$build/memory" --ops all_reduce --from 262144 --to 1048576
    program memory line-64 "$build/memory" --ops all_reduce --from 26214400 --to 67108864
    program memory line-128 "$build/memory" --ops all_reduce --from 1048576 --to 67108864
    if [ -n "$openmpi" ]; then
        program openmpi stock $openmpi --oversubscribe --mca mpi_yield_when_idle 0 -n 2 "$build/openmpi"
        program openmpi ring $openmpi --oversubscribe --mca mpi_yield_when_idle 0 $ring -n 2 "$build/openmpi" --ops all_reduce --from 262144
        program openmpi eager $openmpi --oversubscribe --mca mpi_yield_when_idle 0 $eager -n 2 "$build/openmpi" --ops all_reduce,send_recv --to 65536
        [ $quick = 1 ] || program openmpi sm $openmpi --oversubscribe --mca mpi_yield_when_idle 0 --mca coll_sm_priority 95 -n 2 "$build/openmpi" --ops barrier
    fi
    [ -z "$mpich" ] || program mpich stock $mpich -n 2 "$build/mpich"
    if [ -n "$gloo" ]; then
        program gloo halving "$gloo" --from 26214400 --to 26214400
        program gloo ring "$gloo" --from 26214400 --to 26214400
    fi
}

four_ranks() {
    program ddp - "$build/ddp"
    program memory - "$build/memory"
    if [ -n "$openmpi" ]; then
        program openmpi yield $openmpi --oversubscribe --mca mpi_yield_when_idle 1 -n 4 "$build/openmpi"
        program openmpi ring $openmpi --oversubscribe --mca mpi_yield_when_idle 1 $ring -n 4 "$build/openmpi" --ops all_reduce --from 262144
        program openmpi spin $openmpi --oversubscribe --mca mpi_yield_when_idle 0 -n 4 "$build/openmpi" --ops all_reduce --from 26214400
    fi
    [ -z "$mpich" ] || program mpich stock $mpich -n 4 "$build/mpich" --from 26214400
}

run() { # list, plan, ranks, seconds
    echo "bench: $2, $3 ranks, about $4 s ..."
    share=$build/share.$3
    slots=0 slot=0 jobs_started=
    counting=1
    "$1"
    counting=0
    common="--share $share --out $csv --plan $2 --ranks $3 --slots $slots --seconds $4"
    "$1"
    failed=0
    for job in $jobs_started; do wait "$job" || failed=1; done
    jobs_started=
    [ $failed = 0 ] || { echo "bench: a program failed; no tables are made" >&2; exit 1; }
}

if [ $quick = 1 ]; then
    run two_ranks quick 2 "${two:-55}"
else
    [ "$two" = 0 ] || run two_ranks full 2 "${two:-320}"
    [ "$four" = 0 ] || run four_ranks four 4 "${four:-60}"
fi

# --- tables and plot ---

if command -v python3 >/dev/null; then
    python3 "$here/merge.py" "$out" || exit 1
    if command -v gnuplot >/dev/null; then
        if (cd "$out" && gnuplot "$here/plot.gp") 2>"$build/log"; then echo "bench: wrote $out/all_reduce.svg"; else cat "$build/log"; fi
    else
        echo "bench: gnuplot is not installed (gnuplot-nox): no plot"
    fi
else
    echo "bench: python3 is not installed: no tables; the blocks are in $csv"
fi
