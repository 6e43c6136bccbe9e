/** The colours of the page as canvases need them. */

import type { Paper } from './draw';

export function paper(dark: boolean): Paper {
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string): string => style.getPropertyValue(name).trim() || '#808080';
  return {
    text: colour('--text'), muted: colour('--muted'), line: colour('--border'), surface: colour('--surface'),
    sunken: colour('--sunken'), accent: colour('--accent'), dark,
  };
}

/** The drawing context of a canvas that is `width` by `height` CSS pixels, as sharp as the screen. */
export function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
  const context = canvas.getContext('2d');
  context?.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
