"""envs/webshop_catalogue.py's search against Lucene's own, on the official products: who finds the same, and how fast.

    pip download --no-deps pyserini==0.22.1 && unzip pyserini-0.22.1-*.whl '*.jar'        # and a JDK 17
    WEBSHOP_DATA=<folder> python benchmarks/webshop_lucene.py pyserini/resources/jars/anserini-0.22.1-fatjar.jar

Queries are the instructions of the 415 products that have one. The ten best products of every second, by position, go
to tests/webshop_lucene.txt.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from envs import webshop_catalogue as ours  # noqa: E402

JAVA = """
import java.nio.file.*; import java.util.*;
import org.apache.lucene.analysis.en.EnglishAnalyzer; import org.apache.lucene.document.*;
import org.apache.lucene.index.*; import org.apache.lucene.queryparser.classic.QueryParser;
import org.apache.lucene.search.*; import org.apache.lucene.search.similarities.BM25Similarity;
import org.apache.lucene.store.ByteBuffersDirectory;

public class Peer {
  public static void main(String[] folder) throws Exception {
    var analyzer = new EnglishAnalyzer();
    var similarity = new BM25Similarity(0.9f, 0.4f);
    var directory = new ByteBuffersDirectory();
    var writer = new IndexWriter(directory, new IndexWriterConfig(analyzer).setSimilarity(similarity));
    for (String line : Files.readAllLines(Path.of(folder[0], "products"))) {
      var document = new Document();
      document.add(new TextField("text", line, Field.Store.NO));
      writer.addDocument(document);
    }
    writer.forceMerge(1);
    writer.close();
    var searcher = new IndexSearcher(DirectoryReader.open(directory));
    searcher.setSimilarity(similarity);
    for (String line : Files.readAllLines(Path.of(folder[0], "queries"))) {
      var hits = searcher.search(new QueryParser("text", analyzer).parse(QueryParser.escape(line)), 50).scoreDocs;
      System.out.println(String.join(" ", Arrays.stream(hits).map(hit -> "" + hit.doc).toList()));
    }
  }
}
"""


def main() -> None:
    """Search with both, write the fixture, print the agreement."""
    jar, folder = Path(sys.argv[1]).resolve(), Path(os.environ["WEBSHOP_DATA"])
    products = list(ours.official(folder).products.values())
    queries = [product.instruction.lower() for product in products if product.instruction]
    with TemporaryDirectory() as name:
        for file, lines in (("products", [ours.searched_text(p) for p in products]), ("queries", queries)):
            (Path(name) / file).write_text("".join(" ".join(line.lower().split()) + "\n" for line in lines))
        (Path(name) / "Peer.java").write_text(JAVA)
        command = ["java", "-cp", str(jar), str(Path(name) / "Peer.java"), name]
        theirs = [[int(i) for i in line.split()] for line in subprocess.check_output(command, text=True).splitlines()]
    search, start = ours.index(products), time.perf_counter()
    found = [[products.index(product) for product in search(query)] for query in queries]
    milliseconds = 1e3 * (time.perf_counter() - start) / len(queries)
    pairs = list(zip(found, theirs, strict=True))
    first = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
    ten, fifty = (sum(len({*a[:n]} & {*b[:n]}) / len(b[:n]) for a, b in pairs) / len(pairs) for n in (10, 50))
    print(
        f"{len(pairs)} queries: first equal {first:.3f}, of ten {ten:.4f}, of fifty {fifty:.4f}; {milliseconds:.2f} ms"
    )
    lines = [" ".join(map(str, positions[:10])) for positions in theirs[::2]]
    (ROOT / "tests/webshop_lucene.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
