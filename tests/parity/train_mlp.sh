#!/bin/sh
# train_mlp on small synthetic images: the same weights and test results on any number of ranks, processes or
# threads. Every image is tested once. An error in the data is one sentence. With "fashion" as a second
# argument: over 88% on Fashion-MNIST, skipped if it is not installed.
# usage: train_mlp.sh path/of/train_mlp [fashion]
. "$(dirname "$0")/../support/train_gpt.sh"
if [ "${2:-}" = fashion ]; then
    [ -f /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ] || { echo "skipped: no dataset-fashion-mnist"; exit 77; }
    limit=$((limit * 4)) # no test of speed
    timeout "$limit" "$program" --epochs 4 --lr 0.002 > out 2> err || fail "status $?: $(cat err)"
    right=$(sed -n 's/^test images right: \([0-9]*\) of 10000$/\1/p' out)
    [ "${right:-0}" -gt 8800 ] || fail "too few of 10000 images: $(cat out)"
    echo "train_mlp: $right of 10000"
    exit 0
fi

# 300 and 101 images of 5 x 7 pixels: noise, and bright rows selected by the label.
python3 - <<'END' || fail "no data"
import os, random, struct
def write(name, *shape):
    return open(name, "wb"), struct.pack(">4B%dI" % len(shape), 0, 0, 8, len(shape), *shape)
def images(prefix, count, pixels=35):
    random.seed(prefix)
    labels = [random.randrange(3) for _ in range(count)]
    file, head = write(prefix + "-images-idx3-ubyte", count, 5, pixels // 5)
    file.write(head + b"".join(bytes(random.randrange(130) + (i % 3 == label) * 90 for i in range(pixels)) for label in labels))
    file, head = write(prefix + "-labels-idx1-ubyte", count)
    file.write(head + bytes(labels))
for folder in "good", "other":
    os.mkdir(folder)
    os.chdir(folder)
    images("train", 300)
    images("t10k", 101, 35 if folder == "good" else 30)
    os.chdir("..")
END
gzip good/train-images-idx3-ubyte # gzipped or not
mkdir empty few wide half
for folder in few wide half; do cp good/* $folder; done
cp good/t10k-labels-idx1-ubyte few/train-labels-idx1-ubyte
{ printf '\000\000\015\001\000\000\001\054'; head -c 1200 /dev/zero; } > wide/train-labels-idx1-ubyte # 300 floats
head -c 1000 good/train-images-idx3-ubyte.gz > half/train-images-idx3-ubyte.gz

# run NAME FLAGS...
run() {
    name=$1
    shift
    timeout "$limit" "$program" good --epochs 4 --lr 0.004 --batch 256 "$@" > "$name.out" 2> "$name.err" || fail "$name: status $?: $(cat "$name.err")"
    sed -e 's/  *[0-9.]* s$//' -e '/^ranks: /d' "$name.out" > "$name.same"
    ended "$name"
}
run one --ranks 1
run two --ranks 2
same one two
[ "$slowdown" -gt 1 ] || { run four --ranks 4; same one four; }
run threads --ranks 4 --threads-as-ranks
same one threads
right=$(sed -n 's/^test images right: \([0-9]*\) of 101$/\1/p' one.out)
[ "${right:-0}" -gt 95 ] || fail "it has not learnt: $(cat one.out)"
grep -q '^epoch  4/4 ' one.out || fail "no fourth epoch: $(cat one.out)"

before=$(state)
for ranks in 1 2; do
    wrong "run \`apt-get install dataset-fashion-mnist\`, or give a folder" --ranks $ranks missing
    wrong "there is no empty/train-images-idx3-ubyte.gz" --ranks $ranks empty
    wrong "few/train-labels-idx1-ubyte has another number of samples than the file before it" --ranks $ranks few
    wrong "wide/train-labels-idx1-ubyte does not hold labels of one byte each" --ranks $ranks wide
    wrong "damaged, or cut short" --ranks $ranks half
    wrong "other/t10k-images-idx3-ubyte has another number of pixels" --ranks $ranks other
done
wrong "--batch 100 is not 1, 2, 4 ... micro-batches of 64 for each of 1 ranks; use --batch 64" --ranks 1 --batch 100 good
wrong "use --batch 192" --ranks 3 --batch 256 good
wrong "use --batch 128" --ranks 2 --batch 384 good # 3 micro-batches each: no tree of pairs
echo "train_mlp: the same weights on 1, 2 and 4 ranks, and one sentence for each wrong input"
