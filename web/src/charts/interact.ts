/** What pointer and keys mean on a plot: moving along the values, drawing a range, zooming. Pure. */

import type { Range, Shape } from './shape';

export type Act =
  | { kind: 'move'; at: number }
  | { kind: 'extend'; at: number }
  | { kind: 'zoom'; range: Range | null }
  | { kind: 'use' }
  | { kind: 'leave' };

const PAGE = 10;
const ZOOM = 2;

export interface Where {
  shape: Shape; shown: Range;
  /** Position of the value pointed at, -1 for none. */
  at: number;
  zoomable: boolean;
}

/** What a key asks for; null for keys that are not ours. */
export function actOf(event: KeyboardEvent, where: Where): Act | null {
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const step = STEPS[event.key];
  if (step !== undefined) {
    const at = moved(where, step);
    return { kind: event.shiftKey && where.zoomable ? 'extend' : 'move', at };
  }
  if (event.key === 'Escape') return { kind: 'leave' };
  if (!where.zoomable) return null;
  if (event.key === 'Enter') return { kind: 'use' };
  if (event.key === '+' || event.key === '=') return { kind: 'zoom', range: zoomed(where, 1 / ZOOM) };
  if (event.key === '-') return { kind: 'zoom', range: zoomed(where, ZOOM) };
  return event.key === '0' ? { kind: 'zoom', range: null } : null;
}

const STEPS: Record<string, number> = {
  ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, PageUp: -PAGE, PageDown: PAGE, Home: -Infinity, End: Infinity,
};

function moved({ shape, shown, at }: Where, step: number): number {
  const first = shape.at.findIndex((x) => x >= shown[0] && x <= shown[1]);
  const last = shape.at.findLastIndex((x) => x >= shown[0] && x <= shown[1]);
  if (at < first || at > last) return step > 0 && step < Infinity ? first : step === -Infinity ? first : last;
  return Math.min(last, Math.max(first, at + step));
}

/** Around the value pointed at, else around the middle. */
function zoomed({ shape, shown, at }: Where, factor: number): Range {
  const [from, to] = shown;
  const centre = shape.at[at] ?? (from + to) / 2;
  return bounded([centre - (centre - from) * factor, centre + (to - centre) * factor], shape);
}

/** Kept within the chart, and no narrower than what two values need. */
export function bounded([from, to]: Range, shape: Shape): Range {
  const [low, high] = shape.domain;
  const least = (high - low) / Math.max(4, shape.at.length) / 2;
  if (to - from < least) {
    const centre = (from + to) / 2;
    return [Math.max(low, centre - least / 2), Math.min(high, centre + least / 2)];
  }
  return [Math.max(low, from), Math.min(high, to)];
}

/** The steps in a range that was drawn over them, also those that a thinned chart leaves out; at least one. */
export function stepsIn([from, to]: Range, shape: Shape): [number, number] {
  // the columns of a heat map stand for the steps from theirs on
  const from0 = shape.drawn === 'heat' ? (shape.at[0] ?? 0) : shape.domain[0];
  const [low, high] = [Math.ceil(from0), Math.floor(shape.domain[1])];
  const first = Math.max(low, Math.ceil(from - 1e-9));
  const last = Math.min(high, Math.floor(to + 1e-9));
  if (first <= last) return [first, last];
  const middle = Math.min(high, Math.max(low, Math.round((from + to) / 2)));
  return [middle, middle];
}
