// Server-sent events out of a fetch body.

// Yields the data of each event. A piece of the body may end anywhere, in the middle of a character too.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.search(/\r\n|\n|\r(?=.)/s)) >= 0) {
        const line = rest.slice(0, end);
        rest = rest.slice(end + (rest.startsWith("\r\n", end) ? 2 : 1));
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    // Also when its user leaves early: the connection must not stay open for nobody.
    reader.cancel().catch(() => {});
  }
}
