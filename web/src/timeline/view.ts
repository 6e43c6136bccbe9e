/**
 * The part of the run that is shown, in ns from the run's first instant, and what moving it means. All functions are
 * pure; `whole` is what there is, and no view leaves it.
 */

import { digits } from '../lib/format';

export interface View { readonly from: number; readonly to: number }
export interface Tick { readonly ns: number; readonly label: string }

/** No closer than this: slices have whole ns. */
const SMALLEST_NS = 20;
/** Pixels that a label of the time axis needs. */
const TICK_PIXELS = 110;
const UNITS: readonly (readonly [number, string])[] = [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs'], [1, 'ns']];

export function span(view: View): number {
  return view.to - view.from;
}

/** The view moved and shrunk so that it lies in `whole`. */
export function within(view: View, whole: View): View {
  const size = Math.min(Math.max(span(view), SMALLEST_NS), Math.max(span(whole), SMALLEST_NS));
  const middle = (view.from + view.to) / 2;
  const from = Math.max(whole.from, Math.min(middle - size / 2, Math.max(whole.to, whole.from + size) - size));
  return { from, to: from + size };
}

/** Zoomed by `factor` (below 1 is closer) so that the instant at `ns` stays where it is. */
export function zoomed(view: View, factor: number, ns: number, whole: View): View {
  const size = Math.min(Math.max(span(view) * factor, SMALLEST_NS), Math.max(span(whole), SMALLEST_NS));
  const share = (ns - view.from) / span(view);
  const from = ns - share * size;
  return within({ from, to: from + size }, whole);
}

/** Moved by a share of what is shown: 0.5 is half a screen later. */
export function panned(view: View, share: number, whole: View): View {
  const by = span(view) * share;
  return within({ from: view.from + by, to: view.to + by }, whole);
}

/** A view of a slice with some room on both sides. */
export function around(from: number, to: number, whole: View, room = 0.6): View {
  const margin = Math.max((to - from) * room, SMALLEST_NS);
  return within({ from: from - margin, to: to + margin }, whole);
}

export function toX(view: View, width: number, ns: number): number {
  return ((ns - view.from) / span(view)) * width;
}

export function toNs(view: View, width: number, x: number): number {
  return view.from + (x / width) * span(view);
}

/** Round instants to be labelled, with labels that tell them apart. */
export function ticks(view: View, width: number): Tick[] {
  const step = nice((span(view) * TICK_PIXELS) / Math.max(width, TICK_PIXELS));
  const found: Tick[] = [];
  for (let at = Math.ceil(view.from / step); at * step <= view.to; at += 1) {
    found.push({ ns: at * step, label: instant(at * step, step) });
  }
  return found;
}

/** An instant with as many digits as `step` needs. */
export function instant(ns: number, step: number): string {
  const [factor, name] = UNITS.find(([size]) => Math.abs(ns) >= size && ns !== 0) ?? UNITS.find(([size]) => step >= size) ?? [1, 'ns'];
  const decimals = Math.max(0, Math.ceil(Math.log10(factor / step) - 1e-9));
  return `${(ns / factor).toLocaleString('en-US', { minimumFractionDigits: decimals, maximumFractionDigits: decimals })} ${name}`;
}

/** The next larger of 1, 2, 5 times a power of ten. */
function nice(least: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5].map((times) => times * power).find((step) => step >= least) ?? 10 * power;
}

/** The view as a link holds it. */
export function written(view: View): string {
  return `${Math.round(view.from)}:${Math.round(view.to)}`;
}

/** A view that a link held; null where it is none. */
export function parsed(text: string | undefined, whole: View): View | null {
  const match = /^(\d{1,16}):(\d{1,16})$/.exec(text ?? '');
  if (match === null) return null;
  const view = { from: Number(match[1]), to: Number(match[2]) };
  return view.to > view.from ? within(view, whole) : null;
}

/** ns as the ms of an input field: few digits where few are enough. */
export function inMs(ns: number): string {
  return String(Number((ns / 1e6).toFixed(Math.abs(ns) >= 1e9 ? 3 : 6)));
}

/** How much one sees: "12.3 ms of 4.56 s" without its units, for a share. */
export function shareOf(view: View, whole: View): string {
  const share = (100 * span(view)) / Math.max(span(whole), 1);
  return share >= 99.95 ? 'all that is here' : `${digits(share)}\u202f% of it`;
}
