/**
 * Where documents come from: the server, or the page itself in the single-file report. Paths are the server's without
 * "/api/" in front ("runs/ID/pages/findings"); in the single-file report they are the keys of its `documents`, what a
 * choice on a page shows among them ("runs/ID/pages/ranks?by=host-3").
 */

import { getContext, setContext } from 'svelte';
import type { Embedded, Failure, Preparing } from './types';

export type Params = Record<string, string>;

export interface Source {
  /** Whether all there is stands in this file: nothing more can be asked for, worker, span and steps are not choosable. */
  readonly embedded: boolean;
  /** The only run of the single-file report; null where the server has a list. */
  readonly run: string | null;
  /** One document. `Preparing` where it is still being made (ask again in a second); throws `SourceError`. */
  get<T>(path: string, params?: Params, signal?: AbortSignal): Promise<T | Preparing>;
  /** Whether `get` of the path without parameters can succeed. A server is always worth asking. */
  has(path: string): boolean;
  /** The full address of a path, for downloads; null in the single-file report. */
  url(path: string, params?: Params): string | null;
}

/** What went wrong, in one line that can be shown. `status` is HTTP's, 0 where no answer came at all. */
export class SourceError extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(message);
    this.name = 'SourceError';
    this.status = status;
  }
}

export function isPreparing(document: unknown): document is Preparing {
  return (document as { schema?: unknown } | null)?.schema === 'stepscope.preparing/1';
}

/** Whether an error only says that its question was taken back by an AbortSignal. */
export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === 'AbortError';
}

/** One line for any thrown value. */
export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

export function query(params: Params | undefined): string {
  const text = new URLSearchParams(params ?? {}).toString();
  return text === '' ? '' : `?${text}`;
}

export class ServedSource implements Source {
  readonly embedded = false;
  readonly run = null;

  async get<T>(path: string, params?: Params, signal?: AbortSignal): Promise<T | Preparing> {
    const request: RequestInit = { credentials: 'same-origin', headers: { accept: 'application/json' } };
    if (signal !== undefined) request.signal = signal;
    let answer: Response;
    try {
      answer = await fetch(this.url(path, params), request);
    } catch (error) {
      if (isAbort(error)) throw error;
      throw new SourceError(0, 'The server does not answer. Is “stepscope view” still running?');
    }
    if (!answer.ok) throw new SourceError(answer.status, await failure(answer));
    return (await answer.json()) as T | Preparing;
  }

  has(): boolean {
    return true;
  }

  url(path: string, params?: Params): string {
    return new URL(`api/${path}${query(params)}`, document.baseURI).toString();
  }
}

/** The reason that the server gave, or its status where a proxy in between answered. */
async function failure(answer: Response): Promise<string> {
  try {
    const body = (await answer.json()) as Partial<Failure>;
    if (typeof body.error === 'string') return body.error;
  } catch (error) {
    if (isAbort(error)) throw error;
  }
  if (answer.status === 403) return 'The server refused: open the address that “stepscope view” printed, with its token.';
  return `The server answered with status ${answer.status}.`;
}

export class EmbeddedSource implements Source {
  readonly embedded = true;
  readonly run: string;
  readonly #documents: Record<string, unknown>;

  constructor(embedded: Embedded) {
    this.run = embedded.run;
    this.#documents = embedded.documents;
  }

  async get<T>(path: string, params?: Params): Promise<T | Preparing> {
    const chosen = Object.entries(params ?? {}).map(([name, value]) => `${path}${query({ [name]: value })}`).find((each) => this.has(each));
    if (chosen !== undefined) return this.#documents[chosen] as T;
    if (!this.has(path)) throw new SourceError(404, 'This report does not hold that. “stepscope view RUN” shows it.');
    return this.#documents[path] as T;
  }

  has(path: string): boolean {
    return Object.hasOwn(this.#documents, path);
  }

  url(): null {
    return null;
  }
}

/**
 * The documents of the single-file report, or null when served. The element's text is JSON, or, where its attribute
 * `data-encoding` is "gzip-base64", JSON that was compressed by gzip and then written in base64.
 */
export async function embeddedDocuments(): Promise<Embedded | null> {
  const element = document.getElementById('stepscope-data');
  if (element === null) return null;
  const text = element.textContent ?? '';
  const packed = element.dataset['encoding'] === 'gzip-base64';
  const embedded = JSON.parse(packed ? await unpack(text) : text) as Embedded;
  element.remove();
  return embedded;
}

async function unpack(text: string): Promise<string> {
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).text();
}

const KEY = Symbol('source');

export function setSource(source: Source): void {
  setContext(KEY, source);
}

/** The source of the page; to be called while a component is being set up, as Svelte's contexts must. */
export function getSource(): Source {
  return getContext<Source>(KEY);
}
