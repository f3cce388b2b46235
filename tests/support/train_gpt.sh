# Included first by the scripts that run the trainer at path $1. $program is its absolute path, $limit the
# seconds for one run. The shell is in a temporary folder, which is removed at the end.
set -u
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
slowdown=${DDP_TEST_SLOWDOWN:-1} # 3 and 6 under sanitizers: fewer steps and numbers of ranks are enough there
limit=$((180 * slowdown))
work=$(mktemp -d) || exit 1
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work" || exit 1
# comparable NAME: NAME.same is the part of NAME.out that must not depend on the ranks.
comparable() { sed -e 's/ *[0-9]* tokens\/s//' -e 's/ETA.*//' -e '/ ranks\{0,1\}/d' -e '/%/d' -e '/MiB/d' -e '/--recompute/d' -e '/^$/d' "$1.out" > "$1.same"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
# ended NAME: the last line of NAME.out is the hash of the weights.
ended() { tail -n 1 "$1.out" | grep -Eq '^weights hash: [0-9a-f]{16}$' || fail "$1: the last line is no hash: $(tail -n 1 "$1.out")"; }
same() { cmp -s "$1.same" "$2.same" || { diff "$1.same" "$2.same" >&2; fail "$1 and $2 differ"; }; }
# train_with NAME PROGRAM FLAGS...: NAME.all is the output. NAME.out is the same without the tables that the
# sed script $tables deletes.
train_with() {
    name=$1
    shift
    timeout "$limit" "$@" text > "$name.all" 2> "$name.err" || fail "$name: status $?: $(cat "$name.err")"
    sed "$tables" "$name.all" > "$name.out"
    comparable "$name"
    ended "$name"
}
# losses NAME: every loss that NAME.out shows.
losses() { grep -o 'loss [0-9][0-9.]*' "$1.out" | cut -d ' ' -f 2; }
# close NAME [AS [WITHIN]]: as many losses as train_gpt has printed in the run AS, each within the last of the
# four digits that are shown, or WITHIN.
close() {
    losses "$1" > "$1.losses"
    losses "${2:-whole}" > as.losses
    paste as.losses "$1.losses" | awk -v within="${3:-0.00011}" 'NF != 2 || $1 - $2 > within || $2 - $1 > within { bad = 1 } END { exit bad || !NR }' ||
        { paste as.losses "$1.losses" >&2; fail "$1: the losses are not those of train_gpt"; }
}
# hash_of NAME: the last line.
hash_of() { tail -n 1 "$1.out"; }
# fashion: data has the files of Fashion-MNIST. The test is skipped where they are not installed.
fashion() {
    [ -f /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ] || { echo "skipped: no dataset-fashion-mnist"; exit 77; }
    cp -r /usr/share/datasets/fashion-mnist data && gunzip -r data || fail "no data"
}
state() { find . -type f -exec cksum {} + | sort; find . -type d | sort; }
# refused EXPECTED FLAGS...: expects exit status 1, one sentence on stderr after the program's name or path,
# which contains EXPECTED, and no file created or changed since before=$(state). $problem names the difference,
# $output is the output.
refused() {
    expected=$1
    shift
    output=$(timeout "$limit" "$program" "$@" 2>&1 > /dev/null)
    status=$?
    problem=
    [ $status -eq 1 ] || problem="status $status"
    [ "$(printf '%s\n' "$output" | wc -l)" -eq 1 ] || problem="$problem, not one line"
    case $output in
    "$(basename "$program" | sed 's/\..*//'): "*"$expected"* | "$program: "*"$expected"*) ;;
    *) problem="$problem, no '$expected'" ;;
    esac
    [ "$(state)" = "$before" ] || problem="$problem, files changed"
}
# wrong EXPECTED FLAGS...: is refused.
wrong() {
    refused "$@"
    shift
    [ -z "$problem" ] || fail "$*: $problem: $output"
}
