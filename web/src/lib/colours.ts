/**
 * One colour and one pattern for each role, the same on every page and in both themes. All colours stand out 3:1 from the
 * page; text on them is black or white, whichever is read better (`readable`, at least 4.5:1). What only a colour told,
 * a pattern (areas, bars) or a dash (lines) tells too.
 */

export type Theme = 'light' | 'dark';
export type Pattern = 'solid' | 'rise' | 'fall' | 'rows' | 'columns' | 'dots' | 'mesh' | 'dashes';
export type Hue = keyof typeof HUES;

export interface Look {
  hue: Hue; colour: string; pattern: Pattern;
  /** Lengths of stroke and gap of a line, in px; empty is unbroken. */
  dash: readonly number[];
}

// light, dark, pattern, dash
const HUES = {
  blue: ['#2f6fc4', '#6ba4f0', 'solid', []],
  orange: ['#c8601a', '#f0954d', 'rise', [7, 3]],
  teal: ['#15867d', '#43bfb0', 'rows', [4, 2]],
  violet: ['#7a5bc4', '#ab92f0', 'fall', [9, 3, 2, 3]],
  gold: ['#a97710', '#e3b448', 'columns', [4, 4]],
  magenta: ['#a548a8', '#d78bdb', 'mesh', [12, 3]],
  green: ['#3d8b4f', '#74c482', 'dots', [6, 2, 2, 2, 2, 2]],
  red: ['#c4443c', '#f0837a', 'dashes', [5, 2]],
  indigo: ['#4f5fbf', '#8e9cf2', 'rows', [10, 2, 4, 2]],
  sky: ['#3585ad', '#6cc0e4', 'rise', [5, 3, 1.5, 3]],
  lime: ['#668c2b', '#a9cc62', 'fall', [8, 4]],
  rose: ['#bd4478', '#ee85b0', 'columns', [8, 2, 8, 6]],
  brown: ['#8d6247', '#c79a7c', 'mesh', [3, 3]],
  slate: ['#64748b', '#94a3b8', 'solid', [5, 5]],
  grey: ['#838b96', '#7d8794', 'dots', [6, 6]],
} as const satisfies Record<string, readonly [string, string, Pattern, readonly number[]]>;

/** For what has no role: in this order, as far as the chart does not use them already. */
const ORDER: readonly Hue[] = [
  'blue', 'orange', 'teal', 'violet', 'gold', 'magenta', 'green', 'indigo', 'rose', 'sky', 'brown', 'lime', 'red', 'slate',
];

/** Names of roles by hue. A name is looked up as it is and without "idle_", "host_" or "exposed_" in front. */
const ROLES: Record<Hue, string> = {
  blue: 'forward compute kernel kernels convolution parameter parameters allocated measured wall step utilisation utilization user',
  orange: 'data_wait input data dataloader loader worker ceiling predicted',
  teal: 'backward matmul activation activations sm_efficiency efficiency transferring library',
  violet: 'optimizer optimizer_state clock clocks',
  gold: 'copies copy transfer memcpy h2d d2h temporary power occupancy',
  magenta: 'communication collective nccl network',
  green: 'memory allocator attention faster good rss saved',
  red: 'sync synchronize synchronizing slower critical limit capacity temperature waiting wait stall',
  indigo: 'operators operator cpu_exec cpu_op gradient gradients tensor_core tensor_cores',
  sky: 'launch runtime normalization eval phase steps read',
  lime: 'python host thread cpu',
  rose: 'compile compiling autograd_detail import write',
  brown: 'io files memset disk',
  slate: 'system baseline base reserved median native process annotation',
  grey: 'other unknown unattributed none rest remaining idle overhead before_forward',
};
const BY_ROLE = new Map(
  Object.entries(ROLES).flatMap(([hue, names]) => names.split(' ').map((name) => [name, hue as Hue] as const)),
);

export function hueOf(role: string | null): Hue | null {
  if (role === null) return null;
  const name = role.toLowerCase().replace(/[^a-z0-9]+/g, '_').replace(/^_|_$/g, '');
  return BY_ROLE.get(name) ?? BY_ROLE.get(name.replace(/^(idle|host|exposed)_/, '')) ?? null;
}

export function lookOf(hue: Hue, theme: Theme): Look {
  const [light, dark, pattern, dash] = HUES[hue];
  return { hue, colour: theme === 'dark' ? dark : light, pattern, dash };
}

/** How one thing looks: by its role, without one by a number that its name always gives. */
export function look(role: string | null, theme: Theme, name = ''): Look {
  return lookOf(hueOf(role) ?? ORDER[hash(name) % ORDER.length] ?? 'blue', theme);
}

/** How the series of one chart look, in their order: by role, the rest by hues that are still free. */
export function looks(roles: readonly (string | null)[], theme: Theme): Look[] {
  const used = new Set<Hue>();
  const named = roles.map((role) => {
    const hue = hueOf(role);
    if (hue === null || used.has(hue)) return null;
    used.add(hue);
    return hue;
  });
  const free = ORDER.filter((hue) => !used.has(hue));
  const open = free.length > 0 ? free : ORDER;
  let next = 0;
  return named.map((hue) => (hue === null ? spare(open, next++, theme) : lookOf(hue, theme)));
}

/** Once all hues are taken, they come again with the pattern and dash of another. */
function spare(hues: readonly Hue[], at: number, theme: Theme): Look {
  const own = lookOf(hues[at % hues.length] ?? 'grey', theme);
  const round = Math.floor(at / hues.length);
  const other = lookOf(hues[(at + 3 * round) % hues.length] ?? 'grey', theme);
  return { ...own, pattern: other.pattern, dash: other.dash };
}

/** Black or white: what is read better on an opaque "#rrggbb". */
export function readable(fill: string): '#000000' | '#ffffff' {
  return contrast(fill, '#000000') >= contrast(fill, '#ffffff') ? '#000000' : '#ffffff';
}

/** Contrast of two opaque colours as WCAG defines it, 1 to 21. */
export function contrast(one: string, other: string): number {
  const [low = 0, high = 0] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function luminance(colour: string): number {
  const [red = 0, green = 0, blue = 0] = [1, 3, 5].map((at) => {
    const part = Number.parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function hash(text: string): number {
  let value = 2166136261;
  for (let at = 0; at < text.length; at += 1) value = Math.imul(value ^ text.charCodeAt(at), 16777619);
  return value >>> 0;
}
