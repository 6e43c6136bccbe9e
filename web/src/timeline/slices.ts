/** The slices of one window as columns of numbers, and questions about them. Times are ns from the run's first instant. */

import type { TimelineWindow } from '../lib/types';
import type { View } from './view';

export interface TrackSlices {
  readonly start: Float64Array;
  readonly end: Float64Array;
  readonly depth: Int32Array;
  readonly name: Int32Array;
  readonly kind: Int32Array;
  /** -1 where `count` slices too thin to be seen stand as one. */
  readonly id: Float64Array;
  readonly count: Int32Array;
}

/** A window ready to be drawn. */
export interface Drawn {
  readonly from: number;
  readonly to: number;
  /** Pixels that it was thinned for. */
  readonly pixels: number;
  /** Nothing was merged: no window inside shows more. */
  readonly complete: boolean;
  readonly names: readonly string[];
  readonly kinds: readonly string[];
  readonly tracks: ReadonlyMap<string, TrackSlices>;
  readonly total: number;
  readonly notes: readonly string[];
}

/** One slice by itself; it stays selected when its window has gone. */
export interface Slice {
  readonly track: string;
  readonly id: number;
  readonly name: string;
  readonly kind: string;
  readonly start: number;
  readonly end: number;
  /** -1 where it is not known. */
  readonly depth: number;
  readonly count: number;
}

export const NOTHING: Drawn = {
  from: 0, to: 0, pixels: 1, complete: false, names: [], kinds: [], tracks: new Map(), total: 0, notes: [],
};

export function drawn(window: TimelineWindow, pixels: number): Drawn {
  let merged = false;
  const tracks = new Map<string, TrackSlices>();
  for (const track of window.tracks) {
    const start = Float64Array.from(track.start, (ns) => window.from_ns + ns);
    const end = Float64Array.from(track.duration, (ns, at) => (start[at] ?? 0) + ns);
    tracks.set(track.key, {
      start, end,
      depth: Int32Array.from(track.depth), name: Int32Array.from(track.name), kind: Int32Array.from(track.kind),
      id: Float64Array.from(track.id), count: Int32Array.from(track.count),
    });
    merged ||= track.id.includes(-1);
  }
  return {
    from: window.from_ns, to: window.to_ns, pixels, complete: !merged,
    names: window.names, kinds: window.kinds, tracks, total: window.total, notes: window.notes,
  };
}

/** Whether a window is as good as a new one for `view` on `width` pixels. */
export function serves(window: Drawn, view: View, width: number): boolean {
  if (view.from < window.from - 1 || view.to > window.to + 1) return false;
  if (window.complete) return true;
  return (window.to - window.from) / window.pixels <= 1.4 * ((view.to - view.from) / width);
}

export function sliceAt(window: Drawn, key: string, at: number): Slice | null {
  const track = window.tracks.get(key);
  if (track === undefined || at < 0 || at >= track.start.length) return null;
  return {
    track: key,
    id: track.id[at] ?? -1,
    name: window.names[track.name[at] ?? -1] ?? '',
    kind: window.kinds[track.kind[at] ?? -1] ?? '',
    start: track.start[at] ?? 0,
    end: track.end[at] ?? 0,
    depth: track.depth[at] ?? 0,
    count: track.count[at] ?? 1,
  };
}

/** What stands at an instant in a row, or nearest to it within `tolerance` ns; -1 where nothing does. */
export function hit(track: TrackSlices, depth: number, ns: number, tolerance: number): number {
  let best = -1;
  let nearest = tolerance;
  for (let at = 0; at < track.start.length; at += 1) {
    if (track.depth[at] !== depth) continue;
    const distance = Math.max((track.start[at] ?? 0) - ns, ns - (track.end[at] ?? 0), 0);
    if (distance < nearest || (distance === nearest && best < 0)) [best, nearest] = [at, distance];
  }
  return best;
}

export function same(one: Slice | null, other: Slice | null): boolean {
  if (one === null || other === null) return false;
  if (one.id >= 0 || other.id >= 0) return one.id === other.id;
  return one.track === other.track && one.depth === other.depth && one.start === other.start;
}

/** Where the slice with an id stands in a window; null where it is not drawn by itself. */
export function byId(window: Drawn, id: number): Slice | null {
  if (id < 0) return null;
  for (const [key, track] of window.tracks) {
    const at = track.id.indexOf(id);
    if (at >= 0) return sliceAt(window, key, at);
  }
  return null;
}

/** The next slice to the left or right in the same row. */
export function beside(window: Drawn, slice: Slice, direction: 1 | -1): Slice | null {
  const track = window.tracks.get(slice.track);
  if (track === undefined) return null;
  let best = -1;
  for (let at = 0; at < track.start.length; at += 1) {
    const start = track.start[at] ?? 0;
    if (track.depth[at] !== Math.max(slice.depth, 0) || (start - slice.start) * direction <= 0) continue;
    if (best < 0 || (start - (track.start[best] ?? 0)) * direction < 0) best = at;
  }
  return sliceAt(window, slice.track, best);
}

/** The slice one level up around this one, or the first one below it. */
export function level(window: Drawn, slice: Slice, direction: 1 | -1): Slice | null {
  const track = window.tracks.get(slice.track);
  const depth = slice.depth + direction;
  if (track === undefined || slice.depth < 0 || depth < 0) return null;
  if (direction === -1) return sliceAt(window, slice.track, hit(track, depth, slice.start, 1));
  let best = -1;
  for (let at = 0; at < track.start.length; at += 1) {
    const start = track.start[at] ?? 0;
    if (track.depth[at] !== depth || start < slice.start || start >= slice.end) continue;
    if (best < 0 || start < (track.start[best] ?? 0)) best = at;
  }
  return sliceAt(window, slice.track, best);
}

/** The slice of a track's top level that is nearest to an instant. */
export function nearest(window: Drawn, key: string, ns: number): Slice | null {
  const track = window.tracks.get(key);
  return track === undefined ? null : sliceAt(window, key, hit(track, 0, ns, Infinity));
}

/** Slices that reach into a view, longest first, as many as `limit`, and how many there are. */
export function longest(window: Drawn, view: View, limit: number): { rows: Slice[]; total: number } {
  const found: [number, string, number][] = [];
  for (const [key, track] of window.tracks) {
    for (let at = 0; at < track.start.length; at += 1) {
      const [start, end] = [track.start[at] ?? 0, track.end[at] ?? 0];
      if (end >= view.from && start <= view.to) found.push([end - start, key, at]);
    }
  }
  found.sort((a, b) => b[0] - a[0]);
  const rows = found.slice(0, limit).map(([, key, at]) => sliceAt(window, key, at));
  return { rows: rows.filter((row) => row !== null), total: found.length };
}

/** Names that contain a text, whatever the case of letters, by their numbers. */
export function named(window: Drawn, text: string): Set<number> {
  const wanted = text.trim().toLowerCase();
  const found = new Set<number>();
  if (wanted === '') return found;
  window.names.forEach((name, at) => name.toLowerCase().includes(wanted) && found.add(at));
  return found;
}

/** Slices of a window whose name contains a text, in order of time: the search of a page that has no server. */
export function searched(window: Drawn, text: string, limit: number): { rows: Slice[]; total: number } {
  const names = named(window, text);
  const rows: Slice[] = [];
  if (names.size === 0) return { rows, total: 0 };
  for (const [key, track] of window.tracks) {
    for (let at = 0; at < track.start.length; at += 1) {
      const slice = names.has(track.name[at] ?? -1) && track.id[at] !== -1 ? sliceAt(window, key, at) : null;
      if (slice !== null) rows.push(slice);
    }
  }
  rows.sort((a, b) => a.start - b.start);
  return { rows: rows.slice(0, limit), total: rows.length };
}
