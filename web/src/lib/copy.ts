/** The clipboard, and telling those who hear the page what happened. */

/** Has a text read out once. */
export function announce(text: string): void {
  const region = document.getElementById('announcements');
  if (region === null) return;
  region.textContent = '';
  requestAnimationFrame(() => { region.textContent = text; });
}

/** Puts a text onto the clipboard, on pages too that browsers keep from the newer way (files, plain http). */
export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return byCommand(text);
  }
}

function byCommand(text: string): boolean {
  const field = document.createElement('textarea');
  field.value = text;
  field.className = 'visually-hidden';
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  try {
    return document.execCommand('copy');
  } finally {
    field.remove();
    if (focused instanceof HTMLElement) focused.focus();
  }
}
