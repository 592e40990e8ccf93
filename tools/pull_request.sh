#!/usr/bin/env bash
# Compare the kernels of functions at two commits of the repository in the working directory, and print Markdown.
#
#     tools/pull_request.sh BASE HEAD < functions.txt
#
# Each line of the input is one function with its options for `xlafuse explain`, quoted as in a shell. A line that begins
# with `pytest` runs fusion tests, and the graphs of their functions are compared. Exit code 1 where something failed at
# HEAD. PYTHON names the interpreter.
set -euo pipefail

python=${PYTHON:-python}
mapfile -t lines < <(grep -vE '^[[:space:]]*(#|$)')
if ((${#lines[@]} == 0)); then
  echo "expected lines for \`xlafuse explain\`, or of \`pytest\`; got none" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"; git worktree prune' EXIT

# Write the graphs of a commit to $work/graphs/SIDE, and what failed to $work/SIDE.failures.
explain_at() {
  local side=$1 commit=$2 graphs=$work/graphs/$1 words name
  local -A count=()
  git cat-file -e "$commit^{commit}" 2>/dev/null || git fetch --quiet --depth 1 origin "$commit"
  git worktree add --quiet --detach "$work/$side" "$commit"
  mkdir -p "$graphs"
  for line in "${lines[@]}"; do
    mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$line")
    if [[ ${words[0]} == pytest ]]; then
      words=(-m pytest -q --xlafuse-save "$graphs" "${words[@]:1}")
    else
      name=${words[0]##*:}
      count[$name]=$((${count[$name]:-0} + 1))
      ((count[$name] == 1)) || name+="-${count[$name]}"
      words=(-m xlafuse explain "${words[@]}" -o "$graphs/$name.json")
    fi
    # The commit's own modules come before those of an installed checkout.
    if ! (cd "$work/$side" && PYTHONPATH="$work/$side:$work/$side/src:${PYTHONPATH:-}" "$python" "${words[@]}") \
      </dev/null >"$work/log" 2>&1; then
      printf -- '- `%s`:\n\n  ```text\n%s\n  ```\n' "$line" "$(tail -n 20 "$work/log" | sed 's/^/  /')" \
        >>"$work/$side.failures"
    fi
    cat "$work/log" >&2
  done
}

explain_at base "$1"
explain_at head "$2"

printf '### Kernels before and after\n\n'
status=0
if [[ -z $(ls "$work/graphs/base") || -z $(ls "$work/graphs/head") ]]; then
  echo "One of the commits has none of the functions, so there is nothing to compare."
elif (cd "$work/graphs" && "$python" -m xlafuse diff base head -o "$work/diff.md") >&2 || (($? == 1)); then
  sed 's|^```text$|<details><summary>changed kernels</summary>\n\n&|' "$work/diff.md"
  printf '\n</details>\n\nDeclared bytes: what the compiled kernels read and write. ~: predicted, with an 80%% interval.\n'
else
  echo "The graphs cannot be compared; the log says why."
  status=1
fi
for side in base head; do
  [[ ! -e $work/$side.failures ]] || { printf '\nFailed at %s:\n\n' "$side" && cat "$work/$side.failures"; }
done
[[ ! -e $work/head.failures ]] && exit "$status" || exit 1
