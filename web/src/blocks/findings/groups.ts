/** Findings as they are shown: what one explains stands below it, numbered "1.1", because it is no loss in addition. */

import type { FindingCard } from '../../lib/types';

export interface Numbered { number: string; card: FindingCard; below: Numbered[] }

export function numbered(cards: readonly FindingCard[]): Numbered[] {
  const listed = new Map(cards.map((card) => [card.id, card]));
  const placed = new Set<string>();
  const causeOf = (card: FindingCard): string | null => card.explained_by.find(({ id }) => id !== card.id && listed.has(id))?.id ?? null;
  const tops = cards.filter((card) => causeOf(card) === null);
  const groups = tops.map((card, at) => {
    const number = `${at + 1}`;
    placed.add(card.id);
    return { number, card, below: explained(card, cards, placed).map((each, index) => ({ number: `${number}.${index + 1}`, card: each, below: [] })) };
  });
  // a circle of causes has no top; its cards stand at the end rather than nowhere
  const lost = cards.filter((card) => !placed.has(card.id));
  return [...groups, ...lost.map((card, at) => ({ number: `${groups.length + at + 1}`, card, below: [] }))];
}

/** All that a finding explains, at first or second hand, in the order of the document. */
function explained(cause: FindingCard, cards: readonly FindingCard[], placed: Set<string>): FindingCard[] {
  const reached = new Set([cause.id]);
  for (let before = 0; before < reached.size;) {
    before = reached.size;
    for (const card of cards) if (card.explained_by.some(({ id }) => reached.has(id))) reached.add(card.id);
  }
  const found = cards.filter((card) => reached.has(card.id) && !placed.has(card.id));
  for (const card of found) placed.add(card.id);
  return found;
}

/** A link of a document, where it is one that a browser may follow. */
export function webAddress(text: string): string | null {
  return /^https?:\/\/[^\s]+$/i.test(text) ? text : null;
}
