/**
 * Hands a part of the trace to Perfetto's page: it is opened in a window of its own, says that it is ready, and gets the
 * bytes from this page, in the browser. Only called after a click on a button that says so.
 */

import { SourceError } from '../lib/source';

export const PERFETTO = 'https://ui.perfetto.dev';
const PATIENCE_MS = 90_000;
const ASK_MS = 150;

export interface HandOver {
  /** Address of the trace on our server. */
  address: string;
  title: string;
  file: string;
  signal: AbortSignal;
  say(text: string): void;
}

/** Opens the window; to be called right in the click, or browsers take it for an advertisement. */
export function openWindow(): Window | null {
  return window.open(`${PERFETTO}/`, '_blank');
}

export async function handOver(target: Window, hand: HandOver): Promise<void> {
  hand.say('Cutting the trace …');
  const bytes = await fetched(hand);
  hand.say('Waiting for ui.perfetto.dev …');
  await ready(target, hand.signal);
  target.postMessage({ perfetto: { buffer: bytes, title: hand.title, fileName: hand.file } }, PERFETTO, [bytes]);
  hand.say('Handed over: the trace is open in the other window.');
}

async function fetched(hand: HandOver): Promise<ArrayBuffer> {
  const answer = await fetch(hand.address, { credentials: 'same-origin', signal: hand.signal });
  if (!answer.ok || answer.status === 202) throw new SourceError(answer.status, await reason(answer));
  return answer.arrayBuffer();
}

async function reason(answer: Response): Promise<string> {
  try {
    const said = (await answer.json()) as { error?: unknown; text?: unknown };
    for (const text of [said.error, said.text]) if (typeof text === 'string') return text;
  } catch {
    // no document of ours: the status alone must do
  }
  return `The server answered with status ${answer.status}.`;
}

/** Asks until the page answers; it listens only once its own program runs. */
function ready(target: Window, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const started = Date.now();
    const end = (error: Error | null): void => {
      window.clearInterval(timer);
      window.removeEventListener('message', heard);
      if (error === null) resolve();
      else reject(error);
    };
    const heard = (event: MessageEvent): void => {
      if (event.origin === PERFETTO && event.source === target && event.data === 'PONG') end(null);
    };
    const ask = (): void => {
      if (signal.aborted) end(new Error('Cancelled.'));
      else if (target.closed) end(new Error('The window of ui.perfetto.dev was closed.'));
      else if (Date.now() - started > PATIENCE_MS) end(new Error('ui.perfetto.dev did not answer. Download the trace and open it there.'));
      // to any origin: the window may still be empty, and a question tells nothing
      else target.postMessage('PING', '*');
    };
    window.addEventListener('message', heard);
    const timer = window.setInterval(ask, ASK_MS);
  });
}
