/** What kind of picture a chart block is: where its values stand on x, and how they are drawn. Pure. */

import type { ChartBlock } from '../lib/types';

export type Drawn = 'line' | 'area' | 'bars' | 'scatter' | 'interval' | 'heat';
export type Range = readonly [number, number];

export interface Shape {
  drawn: Drawn;
  stacked: boolean;
  /** Names stand along the vertical axis, values go to the right. */
  lying: boolean;
  /** x are numbers on an axis. Only such charts zoom. */
  numeric: boolean;
  /** Where each value stands on x: the number itself, the middle of a bin, or the position of a name. */
  at: number[];
  /** Of numeric bars: how wide one is on x. 0 otherwise. */
  width: number;
  /** All that x can show. */
  domain: Range;
  /** Texts of x that are no numbers, in their order; of a heat map its rows. */
  names: string[];
}

const DRAWN: Record<ChartBlock['type'], Drawn> = {
  line: 'line', stacked_area: 'area', stacked_bars: 'bars', bars: 'bars', histogram: 'bars', scatter: 'scatter', interval: 'interval', heat: 'heat', multiples: 'line',
};

export function shapeOf(block: ChartBlock): Shape {
  const drawn = DRAWN[block.type];
  // of a histogram with several series all counts together are what is seen
  const stacked = block.type === 'stacked_area' || block.type === 'stacked_bars' || (block.type === 'histogram' && block.series.length > 1);
  const values = block.x.values;
  const numbers = values.filter((value): value is number => typeof value === 'number');
  if (drawn === 'interval' || numbers.length < values.length || numbers.length === 0) {
    const names = values.map((value) => String(value));
    const domain: Range = [-0.5, Math.max(names.length, 1) - 0.5];
    return { drawn, stacked, lying: isLying(drawn), numeric: false, at: names.map((_, at) => at), width: 0, domain, names };
  }
  const shape = { drawn, stacked, lying: false, numeric: true, names: [] };
  if (block.type === 'histogram') return { ...shape, ...bins(numbers, length(block)) };
  const width = drawn === 'bars' || drawn === 'heat' ? gap(numbers) : 0;
  const rows = drawn === 'heat' ? block.series.map((series) => series.name) : [];
  return { ...shape, names: rows, at: numbers, width, domain: domainOf(numbers, width) };
}

/** Bins are given by their lower edges, or by all edges: one more than there are values. */
function bins(edges: number[], count: number): Pick<Shape, 'at' | 'width' | 'domain'> {
  const width = gap(edges);
  const at = edges.slice(0, count).map((edge) => edge + width / 2);
  return { at, width, domain: [edges[0] ?? 0, (at.at(-1) ?? 0) + width / 2] };
}

/** Values of the longest series. */
export function length(block: ChartBlock): number {
  return block.series.reduce((most, series) => Math.max(most, series.values.length), 0);
}

/** Names are read from left to right, whatever their length. */
function isLying(drawn: Drawn): boolean {
  return drawn === 'interval' || drawn === 'bars';
}

function domainOf(values: number[], width: number): Range {
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
  if (low === high && width === 0) return [low - 0.5, high + 0.5];
  return [low - width / 2, high + width / 2];
}

/** The smallest step from one value to another; 1 where there is only one. */
function gap(values: number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  let least = Infinity;
  for (let at = 1; at < sorted.length; at += 1) {
    const step = (sorted[at] ?? 0) - (sorted[at - 1] ?? 0);
    if (step > 0 && step < least) least = step;
  }
  return Number.isFinite(least) ? least : 1;
}

/** The position in `shape.at` nearest to `x` within the shown range, -1 of an empty chart. */
export function nearest(shape: Shape, x: number, shown: Range): number {
  let best = -1;
  let distance = Infinity;
  shape.at.forEach((value, at) => {
    if (value < shown[0] || value > shown[1]) return;
    const away = Math.abs(value - x);
    if (away < distance) [best, distance] = [at, away];
  });
  return best;
}

/** How far a bar reaches beyond its place. Marks of histograms are edges of bins already. */
export function slackOf(block: ChartBlock, shape: Shape): number {
  return block.type === 'histogram' ? 0 : shape.width / 2;
}

/** Where a mark begins and ends on x; null where it names no place of this chart. */
export function placeOf(mark: ChartBlock['marks'][number], shape: Shape): [number, number] | null {
  const place = (end: number | string): number => (typeof end === 'number' ? end : shape.names.indexOf(end));
  const [from, to] = [place(mark.from), place(mark.to)];
  if (shape.numeric) return typeof mark.from === 'number' && typeof mark.to === 'number' ? [from, to] : null;
  return from < 0 || to < 0 ? null : [from, to];
}

/** Labels of the marks that the value at a position lies in. */
export function marksAt(block: ChartBlock, shape: Shape, at: number): string[] {
  const x = shape.numeric ? (shape.at[at] ?? 0) : at;
  const slack = slackOf(block, shape);
  const found = block.marks.filter((mark) => {
    const place = placeOf(mark, shape);
    return place !== null && x >= place[0] - slack && x <= place[1] + slack;
  });
  return found.map((mark) => mark.label);
}
