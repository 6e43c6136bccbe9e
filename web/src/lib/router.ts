/** The current route, kept in the address; the only place that touches the browser's history. */

import { createSubscriber } from 'svelte/reactivity';
import { changed, parse, scopeOf, write, type Change, type Nav, type Params, type Route } from './nav';

export class Router implements Nav {
  #route: Route;
  readonly #subscribe: () => void;
  #update: () => void = () => undefined;

  constructor() {
    this.#route = parse(location.hash);
    this.#subscribe = createSubscriber((update) => {
      this.#update = update;
      return () => { this.#update = () => undefined; };
    });
    window.addEventListener('hashchange', () => this.#read());
    window.addEventListener('popstate', () => this.#read());
  }

  get run(): string {
    this.#subscribe();
    return this.#route.run;
  }

  get page(): string {
    this.#subscribe();
    return this.#route.page;
  }

  get params(): Readonly<Params> {
    this.#subscribe();
    return this.#route.params;
  }

  go(page: string, params: Change = {}): void {
    this.open(this.#target(page, params));
  }

  set(change: Change, options: { push?: boolean } = {}): void {
    const route = { ...this.#route, params: changed(this.#route.params, change) };
    if (write(route) !== write(this.#route)) this.open(route, options.push !== true);
  }

  link(page: string, params: Change = {}): string {
    this.#subscribe();
    return write(this.#target(page, params));
  }

  /** Opens any route: another run, or the list. */
  open(route: Route, replace = false): void {
    const address = write(route);
    try {
      if (replace) history.replaceState(history.state, '', address);
      else history.pushState(null, '', address);
    } catch {
      // browsers refuse it for some files; the address then changes the slower way
      if (replace) location.replace(address);
      else location.hash = address;
    }
    this.#route = route;
    this.#update();
  }

  #target(page: string, params: Change): Route {
    return { run: this.#route.run, page, params: changed(scopeOf(this.#route.params), params) };
  }

  #read(): void {
    // "#main" and the like are anchors, not routes
    if (location.hash !== '' && !location.hash.startsWith('#/')) return;
    const route = parse(location.hash);
    if (write(route) === write(this.#route)) return;
    this.#route = route;
    this.#update();
  }
}
