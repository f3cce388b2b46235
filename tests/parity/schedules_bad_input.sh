#!/bin/sh
# Any invalid input of schedules: exit status 1, one sentence on stderr, no file created.
# usage: schedules_bad_input.sh path/of/schedules
. "$(dirname "$0")/../support/train_gpt.sh"
mkdir folder
: > file
before=$(state)
for value in 0 -1 four 4.5 '' nan inf 1e300 99999999999999999999; do wrong "ranks=$value: give a whole number from 1 to 4096" "$value" 8; done
for value in 0 -1 x8 8.5 65537; do wrong "micro-batches=$value: give a whole number from 1 to 65536" 4 "$value"; done
for value in 0 -2 two 65; do wrong "chunks=$value: give a whole number from 1 to 64" 4 8 "$value"; done
for value in -1 F nan inf 1e7 1,5; do
    wrong "F=$value: give a number from 0 to 1e+06" 4 8 2 "$value"
    wrong "I=$value: give a number" 4 8 2 1 "$value"
    wrong "W=$value: give a number" 4 8 2 1 1 "$value"
    wrong "transfer=$value: give a number" 4 8 2 1 1 1 "$value"
done
wrong "F, I and W are 0" 4 8 2 0 0 0
wrong "usage: schedules [-o FOLDER] [ranks" --ranks 4
wrong "usage: " 4 8 2 1 1 1 0 7
wrong "use at most 1000000" 4096 65536 64
wrong "use at most 1000000" 1001 1000 1
wrong "-o needs a folder" -o
wrong "chunks=-o: give a whole number" 4 8 -o folder
wrong "-o needs a folder" -o ''
wrong "missing/1F1B.csv cannot be written: No such file" -o missing 2 2
wrong "file/1F1B.csv cannot be written" -o file 2 2
timeout "$limit" "$program" -o folder 2 4 2 1 1 1 0 > out || fail "right numbers: status $?"
[ "$(find folder -name '*.svg' | grep -c .)" -eq 13 ] || fail "not every picture is there: $(find folder)"
echo "schedules: every wrong input is one sentence"
