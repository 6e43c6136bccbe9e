/** Which frames a search means: part of a name or place, a regular expression, or a place such as train.py:42. */

import type { FlameDocument } from '../lib/types';

export interface Match {
  /** By number of the frame. */
  readonly frames: readonly boolean[];
  /** The text is no regular expression, and was searched as it is. */
  readonly literal: boolean;
}

const PLACE = /^[^\s()|*+?^$[\]]+:\d+$/;

export function match(document: FlameDocument, text: string): Match {
  const place = PLACE.test(text);
  const { pattern, literal } = patternOf(text, place);
  const frames = document.frames.map(([name, file, line]) => {
    const where = (document.files[file ?? -1] ?? '') + (line === null || line === undefined ? '' : `:${line}`);
    return pattern.test(where) || (!place && pattern.test(document.names[name ?? -1] ?? ''));
  });
  return { frames, literal };
}

/** train.py:42 means this line and not line 421. */
function patternOf(text: string, place: boolean): { pattern: RegExp; literal: boolean } {
  if (place) return { pattern: new RegExp(`(^|/)${escaped(text)}$`, 'i'), literal: false };
  try {
    return { pattern: new RegExp(text, 'i'), literal: false };
  } catch {
    return { pattern: new RegExp(escaped(text), 'i'), literal: true };
  }
}

function escaped(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
}
