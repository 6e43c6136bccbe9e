/** The trees of a flame graph as nodes, and words for their boxes. Every figure comes from the document. */

import { count, digits } from '../lib/format';
import type { FlameDocument, Place } from '../lib/types';

export type Tree = FlameDocument['trees'][number];

/** A box: its number in the tree, its frame, its value on both sides, how it changed, what stands on it. */
export interface Box { i: number; f: number; v: number; b: number; d: number; c?: Box[] }

export interface Frame {
  readonly name: string;
  readonly file: string;
  readonly line: number | null;
  /** "user", "library", "operator", ...; `label` is what the legend calls it. */
  readonly kind: string;
  readonly label: string;
  readonly fill: string;
}

type Named = readonly [word: string, fill: string];

/** The document with its lists as what they hold. */
export class Flame {
  readonly document: FlameDocument;
  readonly #kinds: readonly (readonly [string, string, string])[];
  readonly #changes: readonly Named[];

  constructor(document: FlameDocument) {
    this.document = document;
    this.#kinds = document.kinds as [string, string, string][];
    this.#changes = document.changes as Named[];
  }

  frame(number: number): Frame {
    const [name, file, line, kind] = this.document.frames[number] ?? [];
    const [key, label, fill] = this.#kinds[kind ?? -1] ?? ['', '', '#c3c8cf'];
    return {
      name: this.document.names[name ?? -1] ?? '', file: this.document.files[file ?? -1] ?? '', line: line ?? null, kind: key, label, fill,
    };
  }

  change(number: number): Named {
    return this.#changes[number] ?? ['', '#d9dde3'];
  }

  /** Words and fills that explain the picture of a tree. */
  legend(tree: Tree): Named[] {
    if (tree.base !== null) return (this.document.legend as number[]).map((at) => this.change(at));
    const used = new Set(tree.frame.map((frame) => this.document.frames[frame]?.[3]));
    return this.#kinds.filter(([, label], at) => label !== '' && used.has(at)).map(([, label, fill]) => [label, fill] as const);
  }

  /** The position of the tree with a key; without one, of the tree that comes first. */
  position(key: string | null | undefined, first: string | null): number {
    const keys = this.document.trees.map((tree) => tree.key);
    for (const wanted of [key, first]) {
      const at = keys.indexOf(wanted ?? '');
      if (at >= 0) return at;
    }
    return Math.max(0, Math.min(this.document.first, keys.length - 1));
  }
}

/** Nodes stand parents first, so one pass makes the tree; nothing here recurses. */
export function boxes(tree: Tree): Box[] {
  const made: Box[] = tree.parent.map((_, i) => ({
    i, f: tree.frame[i] ?? 0, v: tree.value[i] ?? 0, b: tree.base?.[i] ?? 0, d: tree.change?.[i] ?? 0,
  }));
  tree.parent.forEach((parent, i) => {
    const [above, box] = [made[parent], made[i]];
    if (above !== undefined && box !== undefined) (above.c ??= []).push(box);
  });
  return made;
}

export function larger(box: Box): number {
  return Math.max(box.v, box.b);
}

export function address(frame: Frame): string {
  return frame.file === '' || frame.line === null ? frame.file : `${frame.file}:${frame.line}`;
}

export function place(frame: Frame, code: string | null = null): Place | null {
  if (frame.file === '') return null;
  return { file: frame.file, line: frame.line, function: frame.name, shown: address(frame), code };
}

/** A box of the user says where it is; "<module>" and its like say nothing without a file. */
export function boxLabel(frame: Frame): string {
  const where = address(frame).split('/').at(-1) ?? '';
  return where !== '' && (frame.kind === 'user' || frame.name.startsWith('<')) ? `${frame.name}  ${where}` : frame.name;
}

export function amount(value: number, unit: string): string {
  return `${Number.isInteger(value) ? count(value) : digits(value)} ${unit}`;
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 2 : 1)} %` : '';
}

/** What stands on a box counts in it; the rest is its own. */
export function own(box: Box, side: 'v' | 'b'): number {
  return box[side] - (box.c ?? []).reduce((sum, child) => sum + child[side], 0);
}

/** What a box is worth, in a few phrases. `base`: widths are of the other side of a difference. */
export function figures(box: Box, root: Box, tree: Tree, sides: [string, string] | null, base: boolean, changed: string): string[] {
  const side = base ? 'b' : 'v';
  const share = percent(box[side], root[side]);
  const small = 1e-5 * larger(root);
  if (tree.base === null || sides === null) {
    const found = [amount(box.v, tree.unit), `${share} of the tree`];
    const rest = own(box, 'v');
    if (box.c !== undefined && rest > small) found.push(`${amount(rest, tree.unit)} in itself`);
    return found;
  }
  const difference = box.v - box.b;
  const sign = difference > 0 ? '+' : '';
  const found = [
    `${amount(box.v, tree.unit)} in ${sides[0]}, ${amount(box.b, tree.unit)} in ${sides[1]}`,
    `${share} of the tree`,
    `${changed}: ${sign}${amount(difference, tree.unit)}`,
  ];
  if (box.c !== undefined) {
    const [here, there] = (['v', 'b'] as const).map((each) => (Math.abs(own(box, each)) < small ? '0' : amount(own(box, each), tree.unit)));
    if (here !== '0' || there !== '0') found.push(`in itself ${here ?? ''} and ${there ?? ''}`);
  }
  return found;
}
