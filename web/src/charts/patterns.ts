/** The patterns of lib/colours.ts as decals of ECharts and as lines in the swatches of legends. */

import type { Pattern, Theme } from '../lib/colours';

export interface Decal {
  color: string; symbol: 'rect' | 'circle'; symbolSize: number; rotation: number;
  dashArrayX: number | (number | number[])[]; dashArrayY: number | number[];
}

type Form = Omit<Decal, 'color'>;

const lines = (rotation: number): Form => ({ symbol: 'rect', symbolSize: 1, rotation, dashArrayX: [1, 0], dashArrayY: [1.5, 6] });
const FORMS: Record<Exclude<Pattern, 'solid'>, Form> = {
  rise: lines(-Math.PI / 4),
  fall: lines(Math.PI / 4),
  rows: lines(0),
  columns: lines(Math.PI / 2),
  dots: { symbol: 'circle', symbolSize: 0.7, rotation: 0, dashArrayX: [[4, 5], [0, 4.5, 4, 0.5]], dashArrayY: [4, 1] },
  mesh: { symbol: 'rect', symbolSize: 1, rotation: Math.PI / 4, dashArrayX: [[1, 0], [1, 7]], dashArrayY: [1, 0, 7, 0] },
  dashes: { symbol: 'rect', symbolSize: 1, rotation: 0, dashArrayX: [[7, 4]], dashArrayY: [1.5, 6] },
};

/** Faint, in the colour of the page: told apart when looked for, calm otherwise. */
export function decalOf(pattern: Pattern, theme: Theme): Decal | 'none' {
  if (pattern === 'solid') return 'none';
  return { ...FORMS[pattern], color: theme === 'dark' ? 'rgba(10, 14, 20, 0.34)' : 'rgba(255, 255, 255, 0.34)' };
}

/** Lines of a pattern in a swatch of 14 by 12, as the path of an SVG; "" for none. */
export const SWATCH: Record<Pattern, string> = {
  solid: '',
  rise: 'M3 0L0 3M8 0L0 8M13 0L1 12M18 0L6 12M23 0L11 12',
  fall: 'M-9 0L3 12M-4 0L8 12M1 0L13 12M6 0L18 12M11 0L23 12',
  rows: 'M0 2H14M0 6H14M0 10H14',
  columns: 'M2 0V12M6 0V12M10 0V12',
  dots: 'M2 2h2M7 2h2M12 2h2M4.5 6h2M9.5 6h2M2 10h2M7 10h2M12 10h2',
  mesh: 'M8 0L0 8M16 0L4 12M24 0L12 12M-2 4L6 12M4 0L14 10M12 0L24 12',
  dashes: 'M1 2H6M9 2H14M1 6H6M9 6H14M1 10H6M9 10H14',
};
