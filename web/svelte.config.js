/** All styles go into one file: the page's policy forbids styles that scripts write. */
export default {
  compilerOptions: { runes: true, css: 'external' },
};
