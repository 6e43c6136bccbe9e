/** Asks until a document is made. */

import { isPreparing, SourceError, type Params, type Source } from './source';
import type { Preparing } from './types';

/** The first wait before asking again, and the longest: most of what is made is there at once. */
const FIRST_MS = 120;
const LONGEST_MS = 1000;
/** How often a server that does not answer is asked again before that is shown. */
const TRIES = 3;

export interface Asked {
  path: string;
  params?: Params;
  signal: AbortSignal;
  /** Told each time that it is still being made. */
  preparing?: (preparing: Preparing) => void;
}

export async function whenReady<T>(source: Source, asked: Asked): Promise<T> {
  const wait = patience();
  for (let failed = 0; ; await wait(asked.signal)) {
    try {
      const answer = await source.get<T>(asked.path, asked.params, asked.signal);
      if (!isPreparing(answer)) return answer;
      failed = 0;
      asked.preparing?.(answer);
    } catch (error) {
      const silent = error instanceof SourceError && error.status === 0;
      if (!silent || ++failed >= TRIES) throw error;
    }
  }
}

/** Waits longer from one time to the next. */
export function patience(): (signal: AbortSignal) => Promise<void> {
  let next = FIRST_MS;
  return (signal) => {
    const now = next;
    next = Math.min(1.5 * next, LONGEST_MS);
    return pause(now, signal);
  };
}

/** Resolves after a while, rejects as fetch does where the signal comes first. */
export function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(new DOMException('taken back', 'AbortError'));
    };
    const timer = setTimeout(() => {
      signal.removeEventListener('abort', stop);
      resolve();
    }, milliseconds);
    if (signal.aborted) stop();
    else signal.addEventListener('abort', stop, { once: true });
  });
}
