/** What the timeline shows and what is chosen in it; components draw it, and links restore it. */

import { count } from '../lib/format';
import { isAbort, isPreparing, message, type Source } from '../lib/source';
import type { SearchResult, SliceDetail, TimelineBlock } from '../lib/types';
import { besideTrack, foldedAtFirst, layout, rowAt, rowOf, type Layout } from './layout';
import { stepsIn, type Step } from './ruler';
import { beside, byId, hit, level, named, nearest, same, searched, sliceAt, type Slice } from './slices';
import { around, panned, parsed, span, toNs, within, zoomed, type View } from './view';
import { Windows } from './windows.svelte';

export const HITS = 200;
const AGAIN_MS = 800;
/** Thinner than this, a chosen slice is gone close to. */
const THIN = 3;
const EMPTY: TimelineBlock = {
  kind: 'timeline', id: '', from_ns: 0, to_ns: 1, steps: [], tracks: [], notes: [], sliceable: false, details: null,
  window: { schema: 'stepscope.timeline/1', from_ns: 0, to_ns: 1, names: [], kinds: [], tracks: [], total: 0, notes: [] },
};

type Hit = SearchResult['hits'][number];

export class TimelineState {
  block: TimelineBlock = $state.raw(EMPTY);
  view: View = $state.raw({ from: 0, to: 1 });
  width = $state(0);
  height = $state(0);
  scrollTop = $state(0);
  folded: ReadonlySet<string> = $state.raw(new Set<string>());
  selected: Slice | null = $state.raw(null);
  hovered: Slice | null = $state.raw(null);
  detail: SliceDetail | null = $state.raw(null);
  detailError = $state('');
  range: View | null = $state.raw(null);
  query = $state('');
  hits: readonly Hit[] = $state.raw([]);
  hitsTotal: number | null = $state(null);
  searchError = $state('');
  /** Which of the hits was gone to last; -1 before the first. */
  hitAt = $state(-1);
  readonly windows: Windows;
  readonly source: Source;
  readonly layout: Layout = $derived(layout(this.block.tracks, this.folded));
  readonly whole: View = $derived.by(() => {
    const { from_ns: from, to_ns: to } = this.source.embedded ? this.block.window : this.block;
    return { from, to: Math.max(to, from + 1) };
  });
  /** The ruler shows one process: the first that the page has. */
  readonly process: string = $derived(this.block.steps[0]?.process ?? '');
  readonly steps: readonly Step[] = $derived(this.block.steps.filter((step) => step.process === this.process));
  readonly stepsInView: [number, number] | null = $derived(stepsIn(this.block.steps, this.view));
  readonly found: ReadonlySet<number> = $derived.by(() => named(this.windows.drawn, this.query));
  /** The selected slice as it is drawn: one that came by a link or a search is not known so well until its window is there. */
  readonly marked: Slice | null = $derived.by(() => {
    const slice = this.selected;
    if (slice === null || (slice.depth >= 0 && slice.kind !== '')) return slice;
    const here = byId(this.windows.drawn, slice.id);
    return here?.start === slice.start ? here : slice;
  });
  readonly related: readonly Slice[] = $derived.by(() => this.#related());
  /** What the search has to say, "" without one. */
  readonly told: string = $derived.by(() => {
    if (this.searchError !== '') return this.searchError;
    if (this.hitsTotal === null) return '';
    if (this.hitsTotal === 0) return 'Nothing is called that.';
    return `${count(this.hitsTotal)} ${this.hitsTotal === 1 ? 'slice' : 'slices'} found`;
  });
  /** Scrolls the tracks; set by the component that holds them. */
  scrollTo: (top: number) => void = () => undefined;
  #run = '';
  #scope: Record<string, string> = {};
  #detailing: AbortController | null = null;
  #searching: AbortController | null = null;

  constructor(source: Source) {
    this.source = source;
    this.windows = new Windows(source);
  }

  /** Takes in a page. What was folded and chosen stays where the tracks are the same. */
  take(block: TimelineBlock, run: string, scope: Record<string, string>, at: string | undefined): void {
    const keys = (tracks: TimelineBlock['tracks']): string => tracks.map((track) => track.key).join('\n');
    const known = keys(block.tracks) === keys(this.block.tracks) && run === this.#run;
    if (!known) this.folded = foldedAtFirst(block.tracks);
    this.block = block;
    this.#run = run;
    this.#scope = scope;
    const first = { from: block.window.from_ns, to: Math.max(block.window.to_ns, block.window.from_ns + 1) };
    const linked = parsed(at, this.whole);
    this.view = linked ?? within(first, this.whole);
    const keep = known && linked !== null && !this.source.embedded ? { view: linked, width: this.width } : null;
    this.windows.start(run, block.window, scope, keep);
  }

  stop(): void {
    this.windows.stop();
    this.#detailing?.abort();
    this.#searching?.abort();
  }

  // ------------------------------------------------------------------ moving
  zoom(factor: number, x = this.width / 2): void {
    this.view = zoomed(this.view, factor, toNs(this.view, Math.max(this.width, 1), x), this.whole);
  }

  pan(share: number): void {
    this.view = panned(this.view, share, this.whole);
  }

  show(view: View): void {
    this.view = within(view, this.whole);
  }

  /** The step before or after the one in the middle. */
  stepBeside(direction: 1 | -1): void {
    const middle = (this.view.from + this.view.to) / 2;
    const next = direction === 1
      ? this.steps.find((step) => step.from_ns > middle)
      : this.steps.findLast((step) => step.to_ns < middle);
    if (next !== undefined) this.view = around(next.from_ns, next.to_ns, this.whole, 0.02);
  }

  // ------------------------------------------------------------------ choosing
  sliceAtPoint(x: number, y: number): Slice | null {
    const place = rowAt(this.layout.rows, y + this.scrollTop);
    const key = place?.row.track?.key;
    const track = key === undefined ? undefined : this.windows.drawn.tracks.get(key);
    if (place === null || key === undefined || track === undefined) return null;
    const tolerance = (3 * span(this.view)) / Math.max(this.width, 1);
    return sliceAt(this.windows.drawn, key, hit(track, place.depth, toNs(this.view, this.width, x), tolerance));
  }

  choose(slice: Slice | null): void {
    if (!same(slice, this.selected)) {
      this.detail = null;
      this.detailError = '';
      this.#detailing?.abort();
      if (slice !== null && slice.id >= 0) void this.#load(slice.id);
    }
    this.selected = slice;
  }

  /** By its id alone, from a link, a search or another slice; the view goes there once it is known where. */
  async chooseId(id: number): Promise<void> {
    const here = byId(this.windows.drawn, id);
    if (here !== null) this.choose(here);
    else await this.#load(id);
    const detail = this.detail;
    const slice = here ?? (detail?.id === id ? this.#fromDetail(detail) : null);
    if (slice === null) return;
    this.selected = slice;
    this.reveal(slice);
  }

  chooseHit(at: number): void {
    const found = this.hits[at];
    if (found === undefined) return;
    this.hitAt = at;
    const slice: Slice = {
      track: this.#trackKey(found.track), id: found.id, name: found.name, kind: byId(this.windows.drawn, found.id)?.kind ?? '',
      start: found.start_ns, end: found.start_ns + found.duration_ns, depth: found.depth, count: 1,
    };
    this.choose(slice);
    this.reveal(slice);
  }

  /** Along the row, to the level above or below, or to the next track. */
  walk(key: 'ArrowLeft' | 'ArrowRight' | 'ArrowUp' | 'ArrowDown'): void {
    const window = this.windows.drawn;
    const from = this.marked ?? this.#firstInView();
    if (from === null) return;
    let next: Slice | null = from;
    if (this.selected !== null && (key === 'ArrowLeft' || key === 'ArrowRight')) next = beside(window, from, key === 'ArrowLeft' ? -1 : 1);
    else if (this.selected !== null) next = this.#vertical(from, key === 'ArrowUp' ? -1 : 1);
    if (next === null) return;
    this.choose(next);
    this.reveal(next, false);
  }

  /** Moves the view so that a slice can be seen; also close enough, with `close`. */
  reveal(slice: Slice, close = true): void {
    const pixels = ((slice.end - slice.start) / span(this.view)) * this.width;
    const outside = slice.end < this.view.from || slice.start > this.view.to;
    if (close && (pixels < THIN || pixels > this.width)) {
      this.view = around(slice.start, Math.max(slice.end, slice.start + 1), this.whole, pixels < THIN ? 4 : 0.05);
    } else if (outside) {
      const middle = (slice.start + slice.end) / 2;
      this.view = within({ from: middle - span(this.view) / 2, to: middle + span(this.view) / 2 }, this.whole);
    }
    this.#scrollTo(slice);
  }

  toggle(key: string): void {
    const folded = new Set(this.folded);
    if (!folded.delete(key)) folded.add(key);
    this.folded = folded;
  }

  label(track: string): string {
    return this.block.tracks.find((each) => each.key === track)?.label ?? track;
  }

  // ------------------------------------------------------------------ searching
  async search(text: string): Promise<void> {
    this.#searching?.abort();
    this.query = text.trim();
    this.searchError = '';
    this.hitAt = -1;
    if (this.query === '') {
      this.hits = [];
      this.hitsTotal = null;
      return;
    }
    if (this.source.embedded) {
      const { rows, total } = searched(this.windows.drawn, this.query, HITS);
      this.hits = rows.map((row) => ({ ...row, start_ns: row.start, duration_ns: row.end - row.start, step: null }));
      this.hitsTotal = total;
      return;
    }
    await this.#search(this.query);
  }

  async #search(text: string): Promise<void> {
    const searching = new AbortController();
    this.#searching = searching;
    const params: Record<string, string> = { text, limit: String(HITS) };
    if (this.#scope['worker'] !== undefined) params['worker'] = this.#scope['worker'];
    try {
      const answer = await this.#patiently<SearchResult>(`runs/${encodeURIComponent(this.#run)}/timeline/search`, params, searching.signal);
      this.hits = answer.hits;
      this.hitsTotal = answer.total;
    } catch (error) {
      if (isAbort(error) || searching.signal.aborted) return;
      this.hits = [];
      this.hitsTotal = null;
      this.searchError = message(error);
    }
  }

  // ------------------------------------------------------------------ details
  async #load(id: number): Promise<void> {
    this.#detailing?.abort();
    const detailing = new AbortController();
    this.#detailing = detailing;
    if (this.block.details !== null || this.source.embedded) {
      this.detail = this.block.details?.[String(id)] ?? null;
      if (this.detail === null) this.detailError = 'This report does not hold more about this slice; “stepscope view RUN” does.';
      return;
    }
    try {
      const detail = await this.#patiently<SliceDetail>(`runs/${encodeURIComponent(this.#run)}/slices/${id}`, {}, detailing.signal);
      this.detail = detail;
      this.detailError = '';
    } catch (error) {
      if (isAbort(error) || detailing.signal.aborted) return;
      this.detailError = message(error);
    }
  }

  async #patiently<T>(path: string, params: Record<string, string>, signal: AbortSignal): Promise<T> {
    for (;;) {
      const answer = await this.source.get<T>(path, params, signal);
      signal.throwIfAborted();
      if (!isPreparing(answer)) return answer;
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
      signal.throwIfAborted();
    }
  }

  #fromDetail(detail: SliceDetail): Slice {
    return {
      track: this.#trackKey(detail.track), id: detail.id, name: detail.name, kind: byId(this.windows.drawn, detail.id)?.kind ?? '', start: detail.start_ns,
      end: detail.start_ns + detail.duration_ns, depth: -1, count: 1,
    };
  }

  /** Documents may name a track by its key or by what it is called. */
  #trackKey(track: string): string {
    const known = this.block.tracks.find((each) => each.key === track) ?? this.block.tracks.find((each) => each.label === track);
    return known?.key ?? track;
  }

  #related(): Slice[] {
    const detail = this.detail;
    if (detail === null || this.selected?.id !== detail.id) return [];
    const wanted = detail.operator === null ? detail.launched : [...detail.launched, detail.operator];
    // ids are of the page that the detail came with; a run that goes on may have given them anew
    return wanted.map(({ id, name }) => {
      const slice = byId(this.windows.drawn, id);
      // windows hold long names cut
      return slice !== null && name.startsWith(slice.name.replace(/…$/, '')) ? slice : null;
    }).filter((slice) => slice !== null);
  }

  #firstInView(): Slice | null {
    for (const row of this.layout.rows) {
      if (row.track === null || row.top + row.height < this.scrollTop) continue;
      const slice = nearest(this.windows.drawn, row.track.key, (this.view.from + this.view.to) / 2);
      if (slice !== null && slice.end >= this.view.from && slice.start <= this.view.to) return slice;
    }
    return null;
  }

  #vertical(from: Slice, direction: 1 | -1): Slice | null {
    const row = rowOf(this.layout.rows, from.track);
    const beyond = row === null || from.depth + direction >= row.levels;
    const inside = beyond ? null : level(this.windows.drawn, from, direction);
    if (inside !== null) return inside;
    const instant = Math.max(from.start, this.view.from);
    for (let key = besideTrack(this.layout.rows, from.track, direction); key !== null; key = besideTrack(this.layout.rows, key, direction)) {
      const slice = nearest(this.windows.drawn, key, instant);
      if (slice !== null) return slice;
    }
    return null;
  }

  #scrollTo(slice: Slice): void {
    const group = this.block.tracks.find((track) => track.key === slice.track)?.group;
    if (group !== undefined && this.folded.has(`group:${group}`)) this.toggle(`group:${group}`);
    if (slice.depth > 0 && this.folded.has(`track:${slice.track}`)) this.toggle(`track:${slice.track}`);
    const row = rowOf(this.layout.rows, slice.track);
    if (row === null) return;
    const top = row.top + Math.max(slice.depth, 0) * row.level;
    if (top < this.scrollTop || top + row.level + 8 > this.scrollTop + this.height) this.scrollTo(Math.max(0, top - this.height / 3));
  }
}
