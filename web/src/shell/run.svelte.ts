/** What is known of the run that is looked at: its head, the page shown, and how it goes on. */

import { follow } from '../lib/live';
import { patience, whenReady } from '../lib/load';
import type { Params } from '../lib/nav';
import { isAbort, message, type Source } from '../lib/source';
import type { Live, PageDocument, Preparing, RunHead } from '../lib/types';

export class RunModel {
  head: RunHead | null = $state.raw(null);
  /** The last page that was loaded; it stays until the next one is there. */
  page: PageDocument | null = $state.raw(null);
  live: Live | null = $state.raw(null);
  preparing: Preparing | null = $state.raw(null);
  loading: boolean = $state(false);
  /** Why the run or the page cannot be shown. */
  error: string | null = $state(null);
  /** Why what is shown does not follow the run any more. */
  stale: string | null = $state(null);
  /** Counts how often the run changed since it was opened; head and page are then to be loaded again. */
  changes: number = $state(0);

  readonly #source: Source;
  readonly #run: string;
  readonly #path: string;
  /** What `page` was asked for. */
  #shown = '';
  /** The last revision that was loaded because the server told of it. */
  #told = 0;

  constructor(source: Source, run: string) {
    this.#source = source;
    this.#run = run;
    this.#path = `runs/${encodeURIComponent(run)}`;
  }

  /** Loads the head, again and again while the run is being prepared. */
  async loadHead(signal: AbortSignal): Promise<void> {
    const wait = patience();
    try {
      do {
        if (this.head?.preparing) await wait(signal);
        this.head = await whenReady<RunHead>(this.#source, { path: this.#path, signal });
      } while (this.head.preparing !== null);
      if (this.head.error !== null && this.page === null) this.error = this.head.error;
    } catch (error) {
      this.#failed(error, this.head !== null);
    }
  }

  /** Loads a page. One that is shown already is renewed quietly. */
  async loadPage(page: string, params: Params, signal: AbortSignal): Promise<void> {
    const wanted = JSON.stringify([page, params]);
    const quiet = wanted === this.#shown;
    const path = `${this.#path}/pages/${encodeURIComponent(page)}`;
    const preparing = (told: Preparing): void => { if (!quiet) this.preparing = told; };
    this.loading = !quiet;
    try {
      this.page = await whenReady<PageDocument>(this.#source, { path, params, signal, preparing });
      this.#shown = wanted;
      this.error = null;
    } catch (error) {
      this.#failed(error, quiet);
    }
    if (signal.aborted) return;
    this.preparing = null;
    this.loading = false;
  }

  /** Until the run ends, or the signal comes. */
  async follow(signal: AbortSignal): Promise<void> {
    if (this.#source.embedded) return;
    await follow(this.#source, {
      run: this.#run,
      revision: () => this.#revision(),
      told: (live) => this.#hear(live),
      failed: (text) => { this.stale = text; },
      signal,
    });
  }

  #hear(live: Live): void {
    this.live = live;
    if (this.page === null || live.revision <= this.#revision() || live.revision === this.#told) return;
    this.#told = live.revision;
    this.changes += 1;
  }

  /** Of the older of what is shown. */
  #revision(): number {
    return Math.min(this.head?.revision ?? 0, this.page?.revision ?? 0);
  }

  #failed(error: unknown, quiet: boolean): void {
    if (isAbort(error)) return;
    if (quiet) this.stale = message(error);
    else this.error = message(error);
  }
}
