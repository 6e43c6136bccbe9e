/** Asks for windows of the timeline: late enough not to ask for every wheel tick, one at a time, and only where needed. */

import { isAbort, isPreparing, message, type Source } from '../lib/source';
import type { TimelineWindow } from '../lib/types';
import { drawn, NOTHING, serves, type Drawn } from './slices';
import { span, within, type View } from './view';

const WAIT_MS = 70;
const AGAIN_MS = 800;
/** Pixels that the first window of a page is thinned for. */
const FIRST_PIXELS = 1_200;
/** Of the view, to be had on both sides beside it. */
const MARGIN = 0.5;

export class Windows {
  drawn: Drawn = $state.raw(NOTHING);
  loading = $state(false);
  error = $state('');
  readonly #source: Source;
  #path = '';
  #scope: Record<string, string> = {};
  #timer: ReturnType<typeof setTimeout> | undefined;
  #asking: AbortController | null = null;
  #wanted = '';
  /** What is drawn is of an older page. */
  #stale = false;

  constructor(source: Source) {
    this.#source = source;
  }

  /**
   * Begins anew with the window that a page came with. Where `keep` is a view that it does not serve, what was drawn so
   * far stays until a new window is there: a run that goes on sends pages again and again.
   */
  start(run: string, window: TimelineWindow, scope: Record<string, string>, keep: { view: View; width: number } | null): void {
    this.stop();
    this.#path = `runs/${encodeURIComponent(run)}/timeline`;
    this.#scope = scope;
    this.error = '';
    const fresh = drawn(window, FIRST_PIXELS);
    this.#stale = keep !== null && !serves(fresh, keep.view, keep.width);
    if (!this.#stale) this.drawn = fresh;
  }

  /** Says what is shown; a window that serves it comes some moments later, unless it is there. */
  need(view: View, whole: View, width: number): void {
    if (this.#source.embedded || width <= 0) return;
    if (!this.#stale && serves(this.drawn, view, width)) {
      this.stop();
      return;
    }
    const room = span(view) * MARGIN;
    const asked = within({ from: view.from - room, to: view.to + room }, whole);
    const pixels = Math.min(4_000, Math.round((width * span(asked)) / span(view)));
    const from = Math.floor(asked.from);
    const to = Math.ceil(asked.to);
    const wanted = `${from}:${to}:${pixels}`;
    if (wanted === this.#wanted) return;
    this.stop();
    this.#wanted = wanted;
    this.#timer = setTimeout(() => void this.#ask(from, to, pixels), WAIT_MS);
  }

  stop(): void {
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#asking = null;
    this.#wanted = '';
    this.loading = false;
  }

  async #ask(from: number, to: number, pixels: number): Promise<void> {
    const asking = new AbortController();
    this.#asking = asking;
    this.loading = true;
    try {
      const params = { ...this.#scope, from: String(from), to: String(to), width: String(pixels) };
      const answer = await this.#source.get<TimelineWindow>(this.#path, params, asking.signal);
      if (asking.signal.aborted) return;
      if (isPreparing(answer)) {
        this.#timer = setTimeout(() => void this.#ask(from, to, pixels), AGAIN_MS);
        return;
      }
      this.drawn = drawn(answer, pixels);
      this.#stale = false;
      this.error = '';
    } catch (error) {
      if (isAbort(error) || asking.signal.aborted) return;
      this.error = message(error);
    }
    this.loading = false;
    this.#asking = null;
    this.#wanted = '';
  }
}
