// Preact with htm instead of JSX: `html` makes elements whose texts are text nodes, never markup.

import { h, render, Fragment } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { h, render, Fragment, useEffect, useLayoutEffect, useMemo, useRef, useState };
