/** What is told of one place on x: by the box beside the pointer, and as a sentence for those who hear the chart. */

import type { Look } from '../lib/colours';
import { format, signed } from '../lib/format';
import type { ChartBlock } from '../lib/types';
import { marksAt, type Shape } from './shape';

export interface Line { at: number; name: string; value: string; look: Look | null }
export interface Readout { head: string; lines: Line[]; more: number; marks: string[] }

const MAX_LINES = 14;

export function readoutOf(block: ChartBlock, shape: Shape, at: number, hidden: ReadonlySet<number>, looks: readonly Look[]): Readout {
  const looked = (index: number): Look | null => (shape.drawn === 'heat' ? null : (looks[index] ?? null));
  const lines = orderOf(block, shape, at).flatMap((index) => (hidden.has(index) ? [] : [lineOf(block, index, at, looked(index))]));
  if (shape.stacked && !shape.lying) lines.reverse();
  const more = Math.max(0, lines.length - MAX_LINES);
  return { head: headOf(block, shape, at), lines: lines.slice(0, MAX_LINES), more, marks: marksAt(block, shape, at) };
}

/** As they are; of a heat map what is not finite and the highest first, for it has more rows than are told. */
function orderOf(block: ChartBlock, shape: Shape, at: number): number[] {
  const all = block.series.map((_, index) => index);
  if (shape.drawn !== 'heat') return all;
  const height = (index: number): number => {
    const series = block.series[index];
    return series?.odd?.some(([position]) => position === at) ? Infinity : (series?.values[at] ?? -Infinity);
  };
  return all.filter((index) => height(index) > -Infinity).sort((one, other) => (height(one) === height(other) ? one - other : height(other) - height(one)));
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
  const value = series?.odd?.find(([position]) => position === at)?.[1] ?? text(series?.values[at] ?? null);
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
