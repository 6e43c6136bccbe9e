/**
 * Light or dark: as the system says until the user chooses; the choice is kept where the browser lets us.
 * `isDark()` is reactive in markup, `$derived` and `$effect`; canvases redraw by reading it.
 */

import { createSubscriber } from 'svelte/reactivity';

export type Choice = 'system' | 'light' | 'dark';

const KEY = 'stepscope.theme';
const system = window.matchMedia('(prefers-color-scheme: dark)');
const listeners = new Set<() => void>();
const subscribe = createSubscriber((update) => {
  listeners.add(update);
  return () => listeners.delete(update);
});
let choice: Choice = stored();

/** Puts the theme onto the root element and keeps it there as the system changes; once, before anything is drawn. */
export function startTheme(): void {
  apply();
  system.addEventListener('change', apply);
}

export function isDark(): boolean {
  subscribe();
  return choice === 'system' ? system.matches : choice === 'dark';
}

export function themeChoice(): Choice {
  subscribe();
  return choice;
}

export function chooseTheme(next: Choice): void {
  choice = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // a page opened from a file may have no storage; the choice then lasts as long as the page
  }
  apply();
}

function apply(): void {
  document.documentElement.dataset['theme'] = isDark() ? 'dark' : 'light';
  for (const update of listeners) update();
}

function stored(): Choice {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === 'light' || kept === 'dark' ? kept : 'system';
  } catch {
    return 'system';
  }
}
