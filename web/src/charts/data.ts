/** The values of a chart as they are drawn: stacked, and bounded to what is shown. Nothing here is a figure to be read. */

import type { ChartBlock, Series } from '../lib/types';
import { rounded, type Scale } from './scale';
import { marksAt, type Range, type Shape } from './shape';

type Values = readonly (number | null)[];

/** Upper edges by series; each lies on the visible ones before it. Null where a series and all before it have nothing. */
export function stack(series: readonly Series[], hidden: ReadonlySet<number>): Values[] {
  let below: Values = [];
  return series.map((each, at) => {
    if (hidden.has(at)) return [];
    const top = each.values.map((value, index) => {
      const under = below[index] ?? null;
      return value === null && under === null ? null : (value ?? 0) + (under ?? 0);
    });
    below = top;
    return top;
  });
}

/** What reaches highest (and of intervals lowest), by series; of a stack its upper edge alone. Hidden ones are empty. */
export function reaches(block: ChartBlock, shape: Shape, hidden: ReadonlySet<number>): { tops: Values[]; bottoms: Values[] } {
  if (shape.stacked) {
    const total = stack(block.series, hidden).findLast((edge) => edge.length > 0);
    return { tops: total === undefined ? [] : [total], bottoms: [] };
  }
  const shown = block.series.map((series, at) => (hidden.has(at) ? null : series));
  const edge = (which: 'high' | 'low'): Values[] =>
    shown.map((series) => series?.values.map((value, at) => {
      const ends = [series[which]?.[at] ?? value, ...(series.points?.[at] ?? [])].filter((each) => each !== null);
      return ends.length === 0 ? null : (which === 'high' ? Math.max : Math.min)(...ends);
    }) ?? []);
  return { tops: edge('high'), bottoms: edge('low') };
}

const STEPS_Y = 4;
const STEPS_LYING = 6;
/** A value this many times what nearly all stay below flattens the rest. */
const FLATTENS = 4;
const FLATTENS_MARKED = 2;
const ROOM = 1.25;
const MANY = 20;
const FEW = 5;
const NEARLY_ALL = 0.95;
const FLOATS = 0.5;

/** The scale of the values within the shown part of x. With a `limit` it ends there, and what is higher is cut. */
export function valueScale(block: ChartBlock, shape: Shape, hidden: ReadonlySet<number>, shown: Range, limit: number | null): Scale {
  const { tops, bottoms } = reaches(block, shape, hidden);
  const seen = (values: readonly Values[]): number[] => values.flatMap((each) => within(each, shape, shown));
  const highs = seen(tops);
  let high = limit ?? block.y.max ?? highest(highs, 0);
  let low = lowest([...seen(bottoms), ...highs]);
  if (block.y.min !== null) low = block.y.min;
  else if (floats(shape, [...seen(bottoms), ...highs])) low = seen(bottoms).reduce((least, value) => Math.min(least, value), high);
  // a value that never changes stands in the middle, above the zero that it is told from
  if (high <= low) [low, high] = high > 0 ? [Math.min(low, block.y.min ?? 0), high * 2] : [low, low + 1];
  const scale = rounded(low, high, block.y.unit, shape.lying ? STEPS_LYING : STEPS_Y);
  if (block.y.max !== null && limit === null) scale.max = block.y.max;
  if (block.y.min !== null) scale.min = block.y.min;
  return { ...scale, ticks: scale.ticks.filter((tick) => tick >= scale.min && tick <= scale.max) };
}

/** Whether values far above zero differ by little: a line of them need not begin at zero, as an area or a bar must. */
function floats(shape: Shape, values: readonly number[]): boolean {
  if ((shape.drawn !== 'line' && shape.drawn !== 'scatter') || values.length < 2) return false;
  const least = values.reduce((found, value) => Math.min(found, value), Infinity);
  return least > 0 && highest(values, 0) - least < FLOATS * least;
}

export interface Cut {
  /** What is higher than this makes the rest look flat. */
  limit: number;
  /** The marked stretches that all of it lies in. Then it is cut until the reader asks for it; a stall elsewhere never is. */
  within: string[];
}

/** Where a chart may be cut so that the rest can be told apart; null where nothing flattens it. */
export function cutOf(block: ChartBlock, shape: Shape, hidden: ReadonlySet<number>, shown: Range): Cut | null {
  if (shape.lying || shape.drawn === 'scatter' || shape.drawn === 'heat' || block.type === 'histogram') return null;
  const tops = reaches(block, shape, hidden).tops;
  const highs = tops.flatMap((each) => within(each, shape, shown));
  const whole = highest(highs, 0);
  const marked = { ...block, marks: block.marks.filter((mark) => mark.event !== true) };
  if (block.select === 'steps' && marked.marks.length > 0) {
    const plain = tops.flatMap((each) => within(each.map((value, at) => (marksAt(marked, shape, at).length > 0 ? null : value)), shape, shown));
    const limit = highest(plain, 0);
    if (plain.length >= FEW && limit > 0 && whole > FLATTENS_MARKED * limit) return { limit, within: beyond(marked, shape, tops, limit) };
  }
  const usual = quantile(highs);
  if (highs.length < MANY || usual === null || whole <= FLATTENS * usual) return null;
  return { limit: usual * ROOM, within: [] };
}

/** Labels of the marks in which something is higher than `limit`. */
function beyond(block: ChartBlock, shape: Shape, tops: readonly Values[], limit: number): string[] {
  const labels = tops.flatMap((each) => each.flatMap((value, at) => (value !== null && value > limit ? marksAt(block, shape, at) : [])));
  return [...new Set(labels)];
}

/** Positions of values with nothing beside them: a line would not show them. */
export function isolated(values: Values): Set<number> {
  const alone = new Set<number>();
  values.forEach((value, at) => {
    if (value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null) alone.add(at);
  });
  return alone;
}

function within(values: Values, shape: Shape, [from, to]: Range): number[] {
  return values.filter((value, at): value is number => {
    const x = shape.at[at];
    return value !== null && x !== undefined && x >= from && x <= to;
  });
}

function highest(values: readonly number[], start: number): number {
  return values.reduce((most, value) => Math.max(most, value), start);
}

function lowest(values: readonly number[]): number {
  return values.reduce((least, value) => Math.min(least, value), 0);
}

function quantile(values: readonly number[]): number | null {
  const sorted = values.filter((value) => value > 0).sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) * NEARLY_ALL)] ?? null;
}
