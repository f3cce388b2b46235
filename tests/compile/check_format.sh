#!/bin/sh
# check_format.sh ROOT [FILE...]: reports each C, C++ and CUDA file (or FILE) that clang-format 14 would change.
# With --fix before ROOT it changes them. Tables and drawings stand between `clang-format off` and `on`.
set -u
fix=
[ "${1:-}" = --fix ] && fix=1 && shift
cd "$1" || exit 1
shift
format=
for name in clang-format-14 clang-format; do
    command -v "$name" >/dev/null 2>&1 && "$name" --version | grep -q 'version 14\.' && format=$name && break
done
[ -n "$format" ] || { echo "clang-format 14 is missing"; exit 77; }
[ $# -gt 0 ] || set -- $(find . -path ./build -prune -o -path ./.git -prune -o -type f \
    \( -name '*.c' -o -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print | sort)
if [ -n "$fix" ]; then
    exec "$format" -i "$@"
fi
"$format" --dry-run --Werror --ferror-limit=1 "$@" 2>&1 | grep 'error:' >"${TMPDIR:-/tmp}/check_format.$$"
count=$(wc -l <"${TMPDIR:-/tmp}/check_format.$$")
sed 's/error: code should be clang-formatted.*/not formatted; run sh tests\/compile\/check_format.sh --fix ./' \
    "${TMPDIR:-/tmp}/check_format.$$"
rm -f "${TMPDIR:-/tmp}/check_format.$$"
echo "$# files, $count findings"
[ "$count" -eq 0 ]
