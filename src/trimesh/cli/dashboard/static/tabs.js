// What the large part of the page shows, one thing at a time.

import { Calls } from "./calls.js";
import { Events } from "./events.js";
import { Hosts } from "./hosts.js";
import { Links } from "./links.js";
import { Logs } from "./logs.js";
import { Overview } from "./overview.js";
import { Rates } from "./rates.js";
import { Stacks } from "./stacks.js";
import { Tasks } from "./timeline.js";
import { Waits } from "./waits.js";

export const TABS = [
  { key: "overview", title: "Overview", shows: Overview },
  { key: "calls", title: "Calls", shows: Calls, of: (board) => board.sums.calls },
  { key: "waits", title: "Waits", shows: Waits, of: (board) => board.waits.boxes.length },
  { key: "tasks", title: "Time line", shows: Tasks },
  { key: "rates", title: "Metrics", shows: Rates },
  { key: "hosts", title: "Hosts", shows: Hosts, of: (board) => board.host_count },
  { key: "links", title: "Links, memory", shows: Links },
  { key: "logs", title: "Logs", shows: Logs },
  { key: "stacks", title: "Stacks", shows: Stacks },
  { key: "events", title: "Events", shows: Events, of: (board) => board.events.length },
];
