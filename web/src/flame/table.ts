/** A tree as a table with levels: what the picture shows, for those who do not see it, and for a CSV. */

import type { Cell, Column, TableBlock, Unit } from '../lib/types';
import { larger, place, type Box, type Flame, type Tree } from './tree';

/** Boxes that are listed: those that count most. With a box all that it stands on is in. */
const LISTED = 1_000;
const UNITS: Readonly<Record<string, readonly [string, Unit]>> = {
  'ms per step': ['Per step', 'ms'], samples: ['Samples', 'count'], us: ['Time', 'us'], bytes: ['Bytes', 'bytes'],
};

export function treeTable(flame: Flame, tree: Tree, made: readonly Box[], id: string): TableBlock {
  const root = made[0];
  const kept = new Set(
    [...made].sort((a, b) => larger(b) - larger(a) || a.i - b.i).slice(0, LISTED).map((box) => box.i),
  );
  const rows: Record<string, Cell>[] = [];
  const waiting: [Box, number][] = root === undefined ? [] : [[root, 0]];
  for (let next = waiting.pop(); next !== undefined; next = waiting.pop()) {
    const [box, depth] = next;
    if (!kept.has(box.i)) continue;
    rows.push(row(flame, tree, box, depth, root));
    const above = [...(box.c ?? [])].sort((a, b) => larger(a) - larger(b));
    for (const child of above) waiting.push([child, depth + 1]);
  }
  return {
    kind: 'table', id, title: `${tree.label}, as a table`, columns: columns(flame, tree), rows, total: made.length,
    sorted_by: null, notes: [], tree: true, open_depth: 3,
  };
}

function row(flame: Flame, tree: Tree, box: Box, depth: number, root: Box | undefined): Record<string, Cell> {
  const frame = flame.frame(box.f);
  const cells: Record<string, Cell> = { depth, name: frame.name, kind: frame.label, place: place(frame), value: box.v };
  if (tree.base !== null) return { ...cells, base: box.b, difference: box.v - box.b, change: flame.change(box.d)[0] };
  return { ...cells, share: root !== undefined && root.v > 0 ? box.v / root.v : null };
}

function columns(flame: Flame, tree: Tree): Column[] {
  const [label, unit] = UNITS[tree.unit] ?? [tree.unit, 'number'];
  const text = { unit: 'text', numeric: false, help: null } as const;
  const number = { unit, numeric: true, help: null } as const;
  const first: Column[] = [
    { ...text, key: 'name', label: 'Name' }, { ...text, key: 'kind', label: 'Kind' }, { ...text, key: 'place', label: 'Place', place: true },
  ];
  const sides = flame.document.sides;
  if (tree.base === null || sides === null) {
    return [...first, { ...number, key: 'value', label, bar: true }, { ...number, key: 'share', label: 'Of the tree', unit: 'share' }];
  }
  return [
    ...first,
    { ...number, key: 'value', label: `${label} in ${sides[0]}` }, { ...number, key: 'base', label: `${label} in ${sides[1]}` },
    { ...number, key: 'difference', label: 'Difference', bar: true }, { ...text, key: 'change', label: 'Change' },
  ];
}
