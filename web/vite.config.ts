import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig, loadEnv } from 'vite';

/** `npm run dev` asks the server at STEPSCOPE_VIEW, the address that `stepscope view` printed, for documents. */
export default defineConfig(({ mode }) => {
  const view = loadEnv(mode, '.', 'STEPSCOPE_')['STEPSCOPE_VIEW'];
  return {
    base: './',
    plugins: [svelte()],
    server: view === undefined ? {} : { proxy: { '/api': proxy(new URL(view)) } },
    build: {
      // one script and one style sheet, so that the same build serves from files and stands inside report.html
      outDir: '../src/stepscope/dashboard/static',
      emptyOutDir: true,
      target: 'es2022',
      sourcemap: false,
      // its polyfill is an inline script, which the policy of the served page forbids
      modulePreload: false,
      assetsInlineLimit: 0,
      cssCodeSplit: false,
      chunkSizeWarningLimit: 2000,
      rollupOptions: {
        output: { entryFileNames: 'assets/[name]-[hash].js', assetFileNames: 'assets/[name]-[hash][extname]' },
      },
    },
  };
});

function proxy(view: URL) {
  const token = view.searchParams.get('token') ?? '';
  return { target: view.origin, changeOrigin: true, headers: { authorization: `Bearer ${token}` } };
}
