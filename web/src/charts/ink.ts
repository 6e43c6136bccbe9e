/** Colours of the theme that a canvas must be told, read from theme.css. */

export interface Ink { text: string; muted: string; border: string; strong: string; surface: string; accent: string; good: string; critical: string; font: string }

export function inkOf(element: Element): Ink {
  const style = getComputedStyle(element);
  const read = (name: string, otherwise: string): string => style.getPropertyValue(name).trim() || otherwise;
  return {
    text: read('--text', '#1b2330'),
    muted: read('--muted', '#515b6c'),
    border: read('--border', '#d5d9e0'),
    strong: read('--border-strong', '#848d9d'),
    surface: read('--surface', '#ffffff'),
    accent: read('--accent', '#1f5fbf'),
    good: read('--good', '#1b6e3c'),
    critical: read('--critical', '#b3261e'),
    font: style.fontFamily,
  };
}
