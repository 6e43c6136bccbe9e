/** What the keys do while the timeline has the focus. */

import type { TimelineState } from './state.svelte';
import { around } from './view';

/** Keys and their meaning, as the help lists them. */
export const KEYS: readonly (readonly [string, string])[] = [
  ['W S or + −', 'zoom in and out'],
  ['A D', 'move earlier and later'],
  ['arrows', 'walk from slice to slice: along the row, to the level or track above and below'],
  ['F or Enter', 'go close to the selected slice or the chosen stretch'],
  ['[ ]', 'previous and next step'],
  ['N P', 'next and previous of what the search found'],
  ['/', 'search'],
  ['Home or 0', 'show everything'],
  ['Esc', 'clear the selection'],
  ['Ctrl and wheel, or pinch', 'zoom at the pointer'],
  ['drag; Shift and drag', 'move; choose a stretch of time'],
];

const STEP = 0.2;
const CLOSER = 0.7;

/** Handles a key; false where it means nothing here. */
export function pressed(event: KeyboardEvent, state: TimelineState, search: () => void): boolean {
  // brackets need AltGr on some keyboards, which comes as Ctrl and Alt
  if ((event.ctrlKey || event.metaKey || event.altKey) && !event.getModifierState('AltGraph')) return false;
  switch (event.key) {
    case 'w': case 'W': case '+': case '=': state.zoom(CLOSER); break;
    case 's': case 'S': case '-': case '−': state.zoom(1 / CLOSER); break;
    case 'a': case 'A': state.pan(-STEP); break;
    case 'd': case 'D': state.pan(STEP); break;
    case 'ArrowLeft': case 'ArrowRight': case 'ArrowUp': case 'ArrowDown': state.walk(event.key); break;
    case 'f': case 'F': case 'Enter': close(state); break;
    case '[': state.stepBeside(-1); break;
    case ']': state.stepBeside(1); break;
    case 'n': case 'N': beside(state, 1); break;
    case 'p': case 'P': beside(state, -1); break;
    case 'Home': case '0': state.show(state.whole); break;
    case '/': search(); break;
    case 'Escape': clear(state); break;
    default: return false;
  }
  return true;
}

/** To the chosen stretch, else to the selected slice. */
export function close(state: TimelineState): void {
  const { range, selected } = state;
  if (range !== null) {
    state.show(range);
    state.range = null;
  } else if (selected !== null) {
    state.show(around(selected.start, selected.end, state.whole, 0.3));
  }
}

function beside(state: TimelineState, direction: 1 | -1): void {
  if (state.hits.length === 0) return;
  state.chooseHit((state.hitAt + direction + state.hits.length) % state.hits.length);
}

function clear(state: TimelineState): void {
  if (state.range !== null) state.range = null;
  else state.choose(null);
}
