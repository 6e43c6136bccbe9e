/**
 * What the slices of a kind are called and filled with. Fills are light enough for dark text, in a bright page as in a
 * dark one, so both themes share them: code, operators and kernels look as in flame graphs, the rest has a tint of the
 * colour that its role has in charts. A colour never tells alone: tracks, labels and details say the kind in words.
 */

import { hueOf, lookOf } from '../lib/colours';

export interface Look { readonly label: string; readonly fill: string }

export const INK = '#14181f';
/** What a search found. */
export const FOUND = '#c026d3';

const OTHER = '#c3c8cf';

/** Kind: what the legend calls it, and its fill or the role whose colour is tinted. */
const KINDS: Readonly<Record<string, readonly [string, string]>> = {
  user_function: ['your code', '#f6ad55'],
  library_function: ['library', '#a9c7e8'],
  operator: ['operator', '#8fd0ad'],
  kernel: ['kernel', '#ecd06f'],
  waiting: ['waiting', '#e79aa8'],
  sampled: ['sampled code', '#f3c78e'],
  runtime: ['runtime call', 'runtime'],
  sync: ['synchronisation', 'sync'],
  annotation: ['annotation', '#d8e2b0'],
  communication: ['communication', 'communication'],
  copy: ['copy', '#9bd3dd'],
  fill: ['memset', 'memset'],
  step: ['step', '#c9d8ea'],
  eval_step: ['evaluation step', '#d9d3c0'],
  data_wait: ['data wait', 'data_wait'],
  before_forward: ['before forward', 'before_forward'],
  forward: ['forward', 'forward'],
  backward: ['backward', 'backward'],
  optimizer: ['optimizer', 'optimizer'],
};

const known = new Map<string, Look>();

export function look(kind: string): Look {
  let found = known.get(kind);
  if (found === undefined) {
    const [label, colour] = KINDS[kind] ?? [kind === '' ? 'other' : kind.replaceAll('_', ' '), OTHER];
    found = { label, fill: colour.startsWith('#') ? colour : tint(colour) };
    known.set(kind, found);
  }
  return found;
}

/** The colour of a role, halfway to white. */
function tint(role: string): string {
  const hue = hueOf(role);
  if (hue === null) return OTHER;
  const { colour } = lookOf(hue, 'light');
  const parts = [1, 3, 5].map((at) => Math.round(255 - 0.5 * (255 - Number.parseInt(colour.slice(at, at + 2), 16))));
  return `#${parts.map((part) => part.toString(16).padStart(2, '0')).join('')}`;
}
