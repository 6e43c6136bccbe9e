/** Follows a run that is still going: asks as often as the server wants to be asked, and not while nobody looks. */

import { pause } from './load';
import { isAbort, isPreparing, message, SourceError, type Source } from './source';
import type { Live } from './types';

/** After failures: twice as long each time, up to this. */
const LONGEST_S = 30;
const FIRST_S = 2;

export interface Watcher {
  run: string;
  /** The revision that is shown now. */
  revision: () => number;
  told: (live: Live) => void;
  /** The server cannot be asked; null once it can again. */
  failed: (text: string | null) => void;
  signal: AbortSignal;
}

/** Ends when the run does (`again_s` is null), when the run is not known any more, or by the signal. */
export async function follow(source: Source, watcher: Watcher): Promise<void> {
  let wait = FIRST_S;
  try {
    for (;;) {
      await seen(watcher.signal);
      const next = await ask(source, watcher);
      if (next === null) return;
      wait = next === 'failed' ? Math.min(2 * wait, LONGEST_S) : FIRST_S;
      await pause(1000 * (next === 'failed' ? wait : next), watcher.signal);
    }
  } catch (error) {
    if (!isAbort(error)) throw error;
  }
}

async function ask(source: Source, watcher: Watcher): Promise<number | null | 'failed'> {
  const path = `runs/${encodeURIComponent(watcher.run)}/live`;
  try {
    const live = await source.get<Live>(path, { revision: String(watcher.revision()) }, watcher.signal);
    watcher.failed(null);
    if (isPreparing(live)) return FIRST_S;
    watcher.told(live);
    return live.again_s === null ? null : Math.max(0.2, live.again_s);
  } catch (error) {
    if (isAbort(error)) throw error;
    watcher.failed(message(error));
    return error instanceof SourceError && error.status === 404 ? null : 'failed';
  }
}

/** Waits until the page is looked at. */
function seen(signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const look = (): void => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener('visibilitychange', look);
      signal.removeEventListener('abort', look);
      if (signal.aborted) reject(new DOMException('taken back', 'AbortError'));
      else resolve();
    };
    document.addEventListener('visibilitychange', look);
    signal.addEventListener('abort', look);
    look();
  });
}
