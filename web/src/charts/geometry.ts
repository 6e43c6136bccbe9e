/** Where the plot lies in its element, and the way between pixels and x. Sizes are CSS px. Pure. */

import type { Range, Shape } from './shape';

export interface Geometry { width: number; height: number; left: number; right: number; top: number; bottom: number }

const LEFT = 68;
const RIGHT = 18;
const TOP = 10;
const BOTTOM = 26;
const SMALL = 80;
const MARKS = 20;
const ROW = 26;
const CELL = 15;
const HEIGHT = { line: 220, area: 240, bars: 220, scatter: 260, interval: 0, heat: 0 } as const;
/** Of a letter in the font of the axes, where it is wide: digits and "m". */
export const LETTER = 7.6;
const MAX_NAMES = 260;
const MIN_NAMES = 60;
const MOST_NAMES = 0.4;

/** Room for names of a lying chart: as much as they need, at most two fifths of the width. */
export function geometryOf(shape: Shape, width: number, series: number, marked: boolean, small: boolean): Geometry {
  const top = TOP + (marked ? MARKS : 0);
  const named = shape.lying || shape.drawn === 'heat';
  if (!named) return { width, height: (small ? SMALL : HEIGHT[shape.drawn]) + top, left: LEFT, right: RIGHT, top, bottom: BOTTOM };
  const longest = shape.names.reduce((most, name) => Math.max(most, name.length), 0);
  const left = Math.max(MIN_NAMES, Math.min(longest * LETTER + 14, MAX_NAMES, width * MOST_NAMES));
  const row = shape.drawn === 'heat' ? CELL : shape.stacked ? ROW : Math.max(ROW, series * 14 + 8);
  return { width, height: Math.max(shape.names.length, 1) * row + top + BOTTOM, left, right: RIGHT + 12, top, bottom: BOTTOM };
}

export function plotWidth(geometry: Geometry): number {
  return Math.max(1, geometry.width - geometry.left - geometry.right);
}

export function plotHeight(geometry: Geometry): number {
  return Math.max(1, geometry.height - geometry.top - geometry.bottom);
}

/** px from the left of the element of a place on the horizontal axis. */
export function pixelOf(value: number, [from, to]: Range, geometry: Geometry): number {
  return geometry.left + ((value - from) / (to - from)) * plotWidth(geometry);
}

/** The place on the horizontal axis at px from the left of the element, kept within the axis. */
export function valueAt(pixel: number, [from, to]: Range, geometry: Geometry): number {
  const share = (pixel - geometry.left) / plotWidth(geometry);
  return from + Math.min(1, Math.max(0, share)) * (to - from);
}

/** The row of a lying chart at px from the top of the element. */
export function rowAt(pixel: number, rows: number, geometry: Geometry): number {
  const at = Math.floor(((pixel - geometry.top) / plotHeight(geometry)) * rows);
  return Math.min(rows - 1, Math.max(0, at));
}
