/** Names that are too long for their place, shortened in the middle so that what tells them from each other stays. Pure. */

const GAP = '…';
const LEAST = 8;

/** By name, each in at most `room` characters. Names that differ stay different, if need be by a number. */
export function shortened(names: Iterable<string>, room: number): Map<string, string> {
  const space = Math.max(LEAST, Math.floor(room));
  const distinct = [...new Set(names)];
  const alike = grouped(distinct, (name) => middle(name, space));
  const labels = new Map<string, string>();
  const used = new Set<string>();
  for (const group of alike) {
    const same = group.length === 1 ? 0 : group.reduce((length, name) => Math.min(length, common(group[0] ?? '', name)), Infinity);
    for (const name of group) {
      let label = group.length === 1 ? middle(name, space) : differing(name, same, space);
      for (let number = 2; used.has(label); number += 1) label = `${middle(name, space - `${number}`.length - 2)} #${number}`;
      used.add(label);
      labels.set(name, label);
    }
  }
  return labels;
}

function grouped(names: readonly string[], by: (name: string) => string): string[][] {
  const groups = new Map<string, string[]>();
  for (const name of names) groups.set(by(name), [...(groups.get(by(name)) ?? []), name]);
  return [...groups.values()];
}

/** The end says more of a path or a module than its beginning. */
function middle(name: string, space: number): string {
  if (name.length <= space) return name;
  const head = Math.floor((space - 1) * 0.45);
  return `${name.slice(0, head)}${GAP}${name.slice(name.length - (space - 1 - head))}`;
}

/** Of names that begin alike for `same` characters: a short beginning, and what follows from the first difference on. */
function differing(name: string, same: number, space: number): string {
  const from = Math.max(0, same - 2);
  const head = Math.min(Math.floor(space / 4), from);
  return `${name.slice(0, head)}${GAP}${middle(name.slice(from), space - head - 1)}`;
}

function common(one: string, other: string): number {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
