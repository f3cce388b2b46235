#!/bin/sh
# examples/train_mlp_cuda.cu on a GPU, on its synthetic data: it learns, and 1 rank, 2 ranks that share GPU 0, and
# a second run have the same losses and weights. A missing GPU is an error that lists the present ones.
# usage: test_mlp.sh path/of/train_mlp_cuda
fail() {
    echo "$*" >&2
    exit 1
}
program=$(realpath "$1") && folder=$(mktemp -d) && cd "$folder" || exit 1
trap 'rm -rf "$folder"' EXIT
for gpus in 0 0,0 0; do
    "$program" --gpus $gpus >now 2>err || fail "--gpus $gpus: status $?: $(cat now err)"
    cat now
    grep -Eq '^weights [0-9a-f]{16}$' now || fail "no hash of the weights: $(cat now)"
    [ -f first ] || cp now first
    cmp first now || fail "--gpus $gpus has other losses or weights than --gpus 0: $(cat first now)"
done
! "$program" --gpus 99 >out 2>err || fail "GPU 99 is accepted"
grep -q 'device 99 does not exist on this machine, which has 0 (' err || fail "GPU 99: $(cat err)"
