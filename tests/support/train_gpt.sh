# Read first by the scripts that run the trainer, whose path is $1: $program is absolute, $limit the seconds that one run may take,
# and the shell is in a folder of its own that is removed at the end.
set -u
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
slowdown=${DDP_TEST_SLOWDOWN:-1} # 3 and 6 under sanitizers, which look at memory and threads: fewer steps and numbers of ranks will do there
limit=$((60 * slowdown))
work=$(mktemp -d) || exit 1
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work" || exit 1
# comparable NAME: NAME.same is what of NAME.out must not depend on the ranks.
comparable() { sed -e 's/ *[0-9]* tokens\/s//' -e 's/ETA.*//' -e '/ ranks\{0,1\}/d' -e '/%/d' "$1.out" > "$1.same"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
