# Parts list of a program (CycloneDX 1.5) from `cargo metadata`, for initrd/parts/sbom.
# $tree: `NAME vVERSION (PATH)` of what is linked, a line each; $lock: Cargo.lock.
def key: "\(.name) \(.version)";
($tree | split("\n") | map(capture("^(?<name>[^ ]+) v(?<version>[^ ]+)") | key) | unique) as $linked
| ($lock | [scan("\\[\\[package\\]\\]\nname = \"([^\"]+)\"\nversion = \"([^\"]+)\"\n"
        + "source = [^\n]+\nchecksum = \"([0-9a-f]+)\"")
    | {key: "\(.[0]) \(.[1])", value: .[2]}] | from_entries) as $sums
| def ref: if .source then "pkg:cargo/\(.name)@\(.version)" else "\(.name)@\(.version)" end;
  (.packages | map(select([key] | inside($linked)))) as $packages
| ($packages | map({key: .id, value: ref}) | from_entries) as $refs
| ($packages[] | select(.name == $program)) as $own
| {
    bomFormat: "CycloneDX", specVersion: "1.5", version: 1,
    metadata: {component: {
        type: "application", "bom-ref": ($own | ref), name: $program, version: $own.version,
        licenses: [{expression: $own.license}],
        hashes: [{alg: "SHA-256", content: $sha256}],
        properties: [{name: "kata-gpu:build-id", value: $id}]
    }},
    components: ([
        # std, and with musl the C library that Rust brings along.
        {
            type: "library", "bom-ref": "rust-std@\($rust)", name: "rust-std", version: $rust,
            licenses: [{expression: "MIT OR Apache-2.0"}]
        }
    ] + ($packages | map(select(.name != $program) | {
        type: "library", "bom-ref": ref, name, version,
        licenses: [{expression: ((.license // "Apache-2.0") | gsub(" ?/ ?"; " OR "))}]
    }
    + (if .source then {purl: ref, hashes: [{alg: "SHA-256", content: $sums[key]}]} else {} end)
    + (if .repository then {externalReferences: [{type: "vcs", url: .repository}]} else {} end))
    | sort_by(.["bom-ref"]))),
    dependencies: (.resolve.nodes | map(select($refs[.id]) | {
        ref: $refs[.id],
        dependsOn: ([.deps[] | select(any(.dep_kinds[]; .kind == null)) | $refs[.pkg] | values]
            | unique)
    }) | sort_by(.ref))
}
