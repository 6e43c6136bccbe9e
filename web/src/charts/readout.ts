/** What is told of one place on x: by the box beside the pointer, and as a sentence for those who hear the chart. */

import type { Look } from '../lib/colours';
import { format, signed } from '../lib/format';
import type { ChartBlock } from '../lib/types';
import type { Shape } from './shape';

export interface Line { at: number; name: string; value: string; look: Look | null }
export interface Readout { head: string; lines: Line[]; more: number; marks: string[] }

const MAX_LINES = 14;

export function readoutOf(block: ChartBlock, shape: Shape, at: number, hidden: ReadonlySet<number>, looks: readonly Look[]): Readout {
  const lines = block.series.flatMap((_, index) => (hidden.has(index) ? [] : [lineOf(block, index, at, looks[index] ?? null)]));
  if (shape.stacked && !shape.lying) lines.reverse();
  const x = shape.numeric ? (shape.at[at] ?? 0) : at;
  const marks = block.marks.filter((mark) => isIn(block, mark, x, shape)).map((mark) => mark.label);
  return { head: headOf(block, shape, at), lines: lines.slice(0, MAX_LINES), more: Math.max(0, lines.length - MAX_LINES), marks };
}

export function sentenceOf(readout: Readout): string {
  const values = readout.lines.map((line) => `${line.name} ${line.value}`);
  return [readout.head, ...values, ...readout.marks].join(', ');
}

function lineOf(block: ChartBlock, index: number, at: number, look: Look | null): Line {
  const series = block.series[index];
  const unit = series?.unit ?? '';
  const [low, high] = [series?.low?.[at] ?? null, series?.high?.[at] ?? null];
  // intervals are of differences, which carry their sign
  const text = (value: number | null): string => (block.type === 'interval' ? signed(value, unit) : format(value, unit));
  const value = text(series?.values[at] ?? null);
  const around = low === null || high === null ? '' : ` (${text(low)} to ${text(high)})`;
  return { at: index, name: series?.name ?? '', value: value + around, look };
}

function headOf(block: ChartBlock, shape: Shape, at: number): string {
  const value = block.x.values[at] ?? null;
  if (!shape.numeric) return String(value ?? '');
  const unit = block.x.unit === '' ? 'number' : block.x.unit;
  if (block.type === 'histogram' && typeof value === 'number') {
    return `${format(value, unit)} to ${format(+(value + shape.width).toPrecision(9), unit)}`;
  }
  const name = block.x.label.charAt(0).toUpperCase() + block.x.label.slice(1);
  return `${name} ${block.select === 'steps' ? String(value) : format(value, unit)}`;
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

function isIn(block: ChartBlock, mark: ChartBlock['marks'][number], x: number, shape: Shape): boolean {
  const place = placeOf(mark, shape);
  const slack = slackOf(block, shape);
  return place !== null && x >= place[0] - slack && x <= place[1] + slack;
}
