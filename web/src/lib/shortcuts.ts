/** Keys that work on every page, as `?` lists them; in fields, and where a block has a key of its own, they mean nothing. */

/** What follows `g`, by page. */
export const LETTERS: Readonly<Record<string, string>> = {
  overview: 'o', findings: 'f', steps: 's', metrics: 'm', ranks: 'r', hang: 'h', timeline: 't', flame: 'l', operators: 'p',
  kernels: 'k', modules: 'd', memory: 'y', compiles: 'c', gpu: 'u', system: 'x', compare: 'a', environment: 'e',
};
const SECOND_MS = 1500;

export interface Actions { go: (page: string) => void; beside: (by: 1 | -1) => void; help: () => void; list: () => void; pages: () => readonly string[] }

/** A handler of `keydown` that remembers a `g` for the next key. */
export function shortcuts(actions: Actions): (event: KeyboardEvent) => void {
  let began = -Infinity;
  return (event) => {
    if (event.defaultPrevented || event.isComposing || typing(event.target)) return;
    if ((event.ctrlKey || event.metaKey || event.altKey) && !event.getModifierState('AltGraph')) return;
    const after = event.timeStamp - began < SECOND_MS;
    began = -Infinity;
    if (after) {
      const page = actions.pages().find((key) => LETTERS[key] === event.key);
      if (event.key === 'i') actions.list();
      else if (page !== undefined) actions.go(page);
      else return;
    } else if (event.key === 'g') began = event.timeStamp;
    else if (event.key === '?') actions.help();
    else if (event.key === '[' || event.key === ']') actions.beside(event.key === ']' ? 1 : -1);
    else return;
    event.preventDefault();
  };
}

function typing(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest('input, select, textarea, [contenteditable], dialog') !== null;
}
