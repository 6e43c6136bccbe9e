#!/usr/bin/env bash
# A performance gate: is the training of HEAD slower than that of BASE? docs/ci.md says how to use it in CI.
#
#   gate.sh BASE HEAD -- COMMAND...     two folders in which the training command is run, in turns
#
# GATE_RUNS   pairs of runs to record (3, the least that a verdict needs); 0 compares what lies in GATE_OUT
# GATE_LIMIT  percent by which HEAD may be slower (3)
# GATE_OUT    where recordings and results go (gate): base/N, head/N, comment.md, compare.html, compare.json
# GATE_UNDECIDED=fail  ends with 4 where the runs cannot tell; by default that passes and is said in the comment
#
# Ends with 0, with 1 where HEAD is slower by the limit or more, and with the status of whatever fails else.
set -euo pipefail

[ $# -ge 4 ] && [ "$3" = "--" ] || { echo "usage: gate.sh BASE HEAD -- COMMAND..." >&2; exit 2; }
base=$(cd "$1" && pwd)
head=$(cd "$2" && pwd)
shift 3
out=${GATE_OUT:-gate}
mkdir -p "$out"
out=$(cd "$out" && pwd)

for pair in $(seq 1 "${GATE_RUNS:-3}"); do # in turns: what changes on the machine meanwhile changes for both
    (cd "$base" && stepscope run --quiet --no-report --out "$out/base/$pair" -- "$@")
    (cd "$head" && stepscope run --quiet --no-report --out "$out/head/$pair" -- "$@")
done

status=0
stepscope compare "$out/base" "$out/head" --fail-on "slower=${GATE_LIMIT:-3}%" --force \
    --html "$out/compare.html" --json "$out/compare.json" >"$out/compare.txt" 2>"$out/messages.txt" || status=$?
cat "$out/compare.txt" "$out/messages.txt"
case $status in
0 | 1 | 4) ;;
*) exit "$status" ;;
esac

verdict=$(sed -n 's/^stepscope: \(.*slower=.*\)/\1/p' "$out/messages.txt")
{
    printf '### Step time of the training\n\n%s\n\n' "$verdict"
    printf '<details><summary>What changed</summary>\n\n``````text\n'
    head -c 50000 "$out/compare.txt" # a comment may have 65,536 characters
    printf '\n``````\n</details>\n'
} >"$out/comment.md"

if [ "$status" = 4 ] && [ "${GATE_UNDECIDED:-pass}" != fail ]; then
    status=0
fi
exit "$status"
