/** Tracks as rows from top to bottom: groups with their heads, each track as high as its levels, folded ones one level high. */

import type { TimelineTrack } from '../lib/types';

export interface Row {
  readonly kind: 'group' | 'track';
  /** What folding is remembered by: "group:NAME" or "track:KEY". */
  readonly key: string;
  readonly label: string;
  readonly top: number;
  readonly height: number;
  readonly folded: boolean;
  /** Whether there is something to fold. */
  readonly foldable: boolean;
  readonly track: TimelineTrack | null;
  /** Height of one level of slices, and how many are shown. */
  readonly level: number;
  readonly levels: number;
  /** Tracks of a group. */
  readonly count: number;
}

export interface Layout { readonly rows: readonly Row[]; readonly height: number }

export const HEAD = 24;
/** Above the first level of a track and below its last. */
export const PAD = 3;
const LEVEL = 18;
const LOW_LEVEL = 13;
/** Deeper tracks get lower levels. */
const DEEP = 16;
/** With more tracks than this, groups behind the first ones start folded. */
const MANY = 40;

export function layout(tracks: readonly TimelineTrack[], folded: ReadonlySet<string>): Layout {
  const rows: Row[] = [];
  let top = 0;
  const add = (row: Omit<Row, 'top'>): void => {
    rows.push({ ...row, top });
    top += row.height;
  };
  for (const [group, members] of grouped(tracks)) {
    const key = `group:${group}`;
    const closed = folded.has(key);
    if (group !== '') {
      add({ kind: 'group', key, label: group, height: HEAD, folded: closed, foldable: true, track: null, level: 0, levels: 0, count: members.length });
    }
    if (closed) continue;
    for (const track of members) add(trackRow(track, folded.has(`track:${track.key}`)));
  }
  return { rows, height: top };
}

function trackRow(track: TimelineTrack, folded: boolean): Omit<Row, 'top'> {
  const all = Math.max(1, track.depth);
  const levels = folded ? 1 : all;
  const level = levels > DEEP ? LOW_LEVEL : LEVEL;
  return {
    kind: 'track', key: `track:${track.key}`, label: track.label, height: levels * level + 2 * PAD, folded,
    foldable: all > 1, track, level, levels, count: 0,
  };
}

/** Groups in the order in which they first come, each with all its tracks. */
function grouped(tracks: readonly TimelineTrack[]): Map<string, TimelineTrack[]> {
  const groups = new Map<string, TimelineTrack[]>();
  for (const track of tracks) {
    const members = groups.get(track.group);
    if (members === undefined) groups.set(track.group, [track]);
    else members.push(track);
  }
  return groups;
}

/** What is folded at first: of very many tracks the groups behind those that fill the first screens. */
export function foldedAtFirst(tracks: readonly TimelineTrack[]): Set<string> {
  const folded = new Set<string>();
  let shown = 0;
  for (const [group, members] of grouped(tracks)) {
    if (shown > 0 && group !== '' && shown + members.length > MANY) folded.add(`group:${group}`);
    else shown += members.length;
  }
  return folded;
}

/** The row at a height, and the level of slices in it. */
export function rowAt(rows: readonly Row[], y: number): { row: Row; depth: number } | null {
  const row = rows.find((each) => y >= each.top && y < each.top + each.height);
  if (row === undefined || row.kind === 'group') return null;
  const depth = Math.floor((y - row.top - PAD) / row.level);
  return { row, depth: Math.max(0, Math.min(depth, row.levels - 1)) };
}

export function rowOf(rows: readonly Row[], track: string): Row | null {
  return rows.find((row) => row.track?.key === track) ?? null;
}

/** The next track above or below that is shown. */
export function besideTrack(rows: readonly Row[], track: string, direction: 1 | -1): string | null {
  const shown = rows.filter((row) => row.track !== null);
  const at = shown.findIndex((row) => row.track?.key === track);
  return shown[at + direction]?.track?.key ?? null;
}
