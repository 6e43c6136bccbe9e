/**
 * What a reader changed about charts. What a link restores stands in the query: `z.NAME=from:to` the part of x that is
 * shown (NAME is the name by which charts zoom together, or the chart's own), `c.ID=off:0,2;full;table` the rest.
 * The place that is pointed at is shared by charts that zoom together, and by nothing else.
 */

import { SvelteMap } from 'svelte/reactivity';
import type { Change } from '../lib/nav';
import type { ChartBlock } from '../lib/types';
import type { Range } from './shape';

export interface Settings {
  off: ReadonlySet<number>;
  /** Whether high values are cut; null as the chart begins. */
  cut: boolean | null;
  table: boolean;
}

const NUMBER = '-?\\d+(?:\\.\\d+)?(?:e[+-]?\\d+)?';
const RANGE = new RegExp(`^(${NUMBER}):(${NUMBER})$`, 'i');

export function zoomKey(block: ChartBlock): string {
  return `z.${block.sync ?? block.id}`;
}

export function settingsKey(block: ChartBlock): string {
  return `c.${block.id}`;
}

/** The part of `domain` that the text in the link shows; all of it where it names none, or one outside. */
export function shownRange(text: string | undefined, domain: Range): Range {
  const match = RANGE.exec(text ?? '');
  if (match === null) return domain;
  const from = Math.max(domain[0], Number(match[1]));
  const to = Math.min(domain[1], Number(match[2]));
  return to > from ? [from, to] : domain;
}

export function zoomChange(block: ChartBlock, domain: Range, range: Range | null): Change {
  const all = range === null || (range[0] <= domain[0] && range[1] >= domain[1]);
  return { [zoomKey(block)]: all ? null : range.map((value) => String(+value.toPrecision(9))).join(':') };
}

export function settingsOf(text: string | undefined): Settings {
  const parts = (text ?? '').split(';');
  const off = parts.find((part) => part.startsWith('off:'))?.slice(4).split(',') ?? [];
  return { off: new Set(off.filter((each) => /^\d+$/.test(each)).map(Number)), cut: parts.includes('typical') ? true : parts.includes('full') ? false : null, table: parts.includes('table') };
}

export function settingsChange(block: ChartBlock, settings: Settings): Change {
  const off = [...settings.off].sort((a, b) => a - b);
  const parts = [off.length > 0 ? `off:${off.join(',')}` : '', settings.cut === null ? '' : settings.cut ? 'typical' : 'full', settings.table ? 'table' : ''];
  return { [settingsKey(block)]: parts.filter((part) => part !== '').join(';') };
}

const domains = new SvelteMap<string, Range>();
const TIMES = new Set(['ns', 'us', 'ms', 's']);

/** Charts over time that zoom together also begin and end together. To be called in an effect; returns its end. */
export function join(block: ChartBlock, own: Range): (() => void) | undefined {
  if (block.sync === null || !TIMES.has(block.x.unit)) return undefined;
  const key = `${block.sync}\n${block.x.unit}\n${block.id}`;
  domains.set(key, own);
  return () => domains.delete(key);
}

/** From the first to the last moment of all charts that zoom with this one. */
export function joined(block: ChartBlock, own: Range): Range {
  if (block.sync === null || !TIMES.has(block.x.unit)) return own;
  const group = `${block.sync}\n${block.x.unit}\n`;
  let [from, to] = own;
  for (const [key, other] of domains) if (key.startsWith(group)) [from, to] = [Math.min(from, other[0]), Math.max(to, other[1])];
  return [from, to];
}

const cursors = new SvelteMap<string, number>();

/** The x that is pointed at in this chart or in one that zooms with it. */
export function cursorOf(block: ChartBlock): number | null {
  return cursors.get(zoomKey(block)) ?? null;
}

export function point(block: ChartBlock, x: number | null): void {
  if (x === null) cursors.delete(zoomKey(block));
  else cursors.set(zoomKey(block), x);
}
