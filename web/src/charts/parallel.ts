/** Where the lines of a picture with parallel axes run: places from 0 (below) to 1, and what a range on an axis lets through. */

import { scalar } from '../lib/format';
import type { Axis } from '../lib/types';

export type Brush = readonly [number, number];
export interface Placed { label: string; ticks: { at: number; text: string }[]; places: (number | null)[] }

const MOST_TICKS = 9;

export function placed(axis: Axis): Placed {
  const { label, choices } = axis;
  const spread = (value: number, low: number, high: number): number => (high > low ? (value - low) / (high - low) : 0.5);
  if (choices.length > 0) {
    const at = (value: number): number => spread(value, 0, choices.length - 1);
    const every = Math.ceil(choices.length / MOST_TICKS);
    const ticks = choices.map((text, value) => ({ at: at(value), text })).filter((_, value) => value % every === 0);
    return { label, ticks, places: axis.values.map((value) => (value === null ? null : at(value))) };
  }
  const scale = (value: number): number => (axis.log ? Math.log(value) : value);
  const known = axis.values.filter((value): value is number => value !== null && (!axis.log || value > 0));
  const low = known.reduce((least, value) => Math.min(least, value), Infinity);
  const high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  const place = (value: number): number => spread(scale(value), scale(low), scale(high));
  const middle = axis.log ? Math.sqrt(low * high) : (low + high) / 2;
  const marked = known.length === 0 ? [] : high > low ? [low, middle, high] : [low];
  return {
    label,
    ticks: marked.map((value) => ({ at: place(value), text: scalar(value) })),
    places: axis.values.map((value) => (value === null || (axis.log && value <= 0) ? null : place(value))),
  };
}

/** The lines that every range lets through; a line without a value on an axis passes only where there is no range. */
export function through(axes: readonly Placed[], brushes: readonly (Brush | null)[], count: number): boolean[] {
  return Array.from({ length: count }, (_, line) =>
    axes.every((axis, at) => {
      const brush = brushes[at] ?? null;
      const place = axis.places[line] ?? null;
      return brush === null || (place !== null && place >= brush[0] && place <= brush[1]);
    }),
  );
}
