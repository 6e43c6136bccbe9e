/**
 * Routes: "#/" is the list of runs, "#/run/ID/PAGE?..." a page of one. All that a link should restore stands in the query.
 * They are hash routes, so that they work behind any proxy and from a file. `router.svelte.ts` holds the current one.
 */

export type Params = Record<string, string>;

export interface Nav {
  /** The run shown; "" on the list. Paths of the source are `runs/${nav.run}/...`. */
  readonly run: string;
  /** Key of the page shown; "" where none is named yet. */
  readonly page: string;
  /** The query of the route. Reactive: read it in markup, `$derived` or `$effect`. */
  readonly params: Readonly<Params>;
  /** Opens a page of the same run. The scope (worker, span, steps) stays unless `params` names it; other state is the page's own. */
  go(page: string, params?: Change): void;
  /** Changes some of the query, null removes. Replaces the entry in the history, `push` makes a new one. */
  set(change: Change, options?: { push?: boolean }): void;
  /** The address that `go` with the same arguments leads to, for `href`. */
  link(page: string, params?: Change): string;
}

export type Change = Record<string, string | null>;

export interface Route { run: string; page: string; params: Params }

/** What stays from page to page. */
export const SCOPE = ['worker', 'span', 'steps'] as const;

export function parse(hash: string): Route {
  const [path = '', search = ''] = split(hash.replace(/^#/, ''), '?');
  const parts = path.split('/').filter((part) => part !== '').map(decode);
  const params = Object.fromEntries(new URLSearchParams(search));
  if (parts[0] !== 'run' || parts[1] === undefined) return { run: '', page: '', params };
  return { run: parts[1], page: parts[2] ?? '', params };
}

export function write(route: Route): string {
  const search = new URLSearchParams(route.params).toString();
  const path = route.run === '' ? '#/' : `#/run/${encodeURIComponent(route.run)}/${encodeURIComponent(route.page)}`;
  return search === '' ? path : `${path}?${search}`;
}

/** Parameters with a change applied; null and "" remove. */
export function changed(params: Readonly<Params>, change: Change): Params {
  const result: Params = { ...params };
  for (const [key, value] of Object.entries(change)) {
    if (value === null || value === '') delete result[key];
    else result[key] = value;
  }
  return result;
}

/** The part of the parameters that says what is looked at: worker, span and steps. */
export function scopeOf(params: Readonly<Params>): Params {
  const scope: Params = {};
  for (const key of SCOPE) {
    const value = params[key];
    if (value !== undefined && value !== '') scope[key] = value;
  }
  return scope;
}

/**
 * Parameters that only this program reads: keys with a dot ("t.TABLEID") and a few that have names of their own. All
 * others belong to the page's document and are sent along when it is asked for.
 */
const VIEW = new Set(['at', 'tree', 'search', 'slice', 'zoom', 'folded']);

export function documentParams(params: Readonly<Params>): Params {
  return Object.fromEntries(Object.entries(params).filter(([key]) => !key.includes('.') && !VIEW.has(key)));
}

/** "3:9" as [3, 9], null where it is nothing like that. */
export function range(text: string | undefined): [number, number] | null {
  const match = /^(\d+):(\d+)$/.exec(text ?? '');
  if (match === null) return null;
  const [first, last] = [Number(match[1]), Number(match[2])];
  return first <= last ? [first, last] : [last, first];
}

function split(text: string, mark: string): [string, string] {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ''] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
