//! A failure means that `image replace-init --verity` makes an image which no guest can mount by
//! dm-verity, or that a changed root, tree or parameter is taken for the right one.
//! Judge: veritysetup.

use crate::initrd::replace_init::{Case, EROFS, cannot_run, done, done_out, init, shell};
use crate::{bytes, stderr, text, write};
use kata_gpu_init::extensions::Verity;
use std::process::{Command, Output};

const MIB: usize = 1 << 20;

impl Case {
    /// A disk with the root in its first partition, by lines for sfdisk, and with other bytes than
    /// zeros wherever nothing was written.
    fn disk(test: &str, lines: &str) -> Self {
        let case = Self::new(test);
        write(case.at("init"), init(&[7; 200_000]));
        case.make(EROFS, "fs");
        let disk = format!(
            "head -c 4194304 /dev/zero | tr '\\0' '\\377' >\"$2\"; printf '{lines}' | sfdisk -q \
             \"$2\"; dd status=none conv=notrunc bs=512 seek=2048 if=\"$1\" of=\"$2\""
        );
        done(&shell(&disk, &[&case.at("fs"), &case.at("old")]));
        case
    }

    fn with_tree(&self, new: &str) -> Output {
        let mut command = self.command("old", new);
        command.args(["--no-nvml", "--verity"]).output().unwrap()
    }

    /// Writes an image's partitions into `data` and `tree`.
    fn cut(&self, image: &str) {
        let table = done_out(&shell("sfdisk -J \"$1\"", &[&self.at(image)]));
        let table: serde_json::Value = serde_json::from_str(&table).unwrap();
        let partitions = &table["partitiontable"]["partitions"];
        // Only a GPT has them.
        let guids = [0, 1].map(|index| partitions[index]["uuid"].as_str());
        assert!(guids[0].is_none() || guids[0] != guids[1], "{guids:?}");
        let disk = bytes(self.at(image));
        for (index, name) in ["data", "tree"].into_iter().enumerate() {
            let part = &partitions[index];
            let sectors = |key: &str| part[key].as_u64().unwrap() as usize * 512;
            let (start, size) = (sectors("start"), sectors("size"));
            write(self.at(name), &disk[start..start + size]);
        }
    }

    /// veritysetup on `data` and another file. Success, and its output.
    fn judge(&self, verb: &str, verity: &Verity, tree: &str, root_hash: &[&str]) -> (bool, String) {
        let mut command = Command::new("/usr/sbin/veritysetup");
        command.args([verb, "--no-superblock", "--hash=sha256", "--format=1"]);
        command.args([
            format!("--salt={}", verity.salt),
            format!("--data-blocks={}", verity.data_blocks),
            format!("--data-block-size={}", verity.data_block_size),
            format!("--hash-block-size={}", verity.hash_block_size),
        ]);
        let files = [self.at("data"), self.at(tree)];
        let output = command.args(files).args(root_hash).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    }
}

/// A file with one bit changed.
fn flip(case: &Case, name: &str, at: usize) {
    let mut changed = bytes(case.at(name));
    changed[at] ^= 1;
    write(case.at(name), changed);
}

#[test]
fn veritysetup_agrees_with_the_hash_tree_and_finds_each_change() {
    if cannot_run(&["veritysetup"]) {
        return;
    }
    // A partition of 2048 sectors has 256 blocks, and their tree, of two levels, 3.
    for (name, sectors, table, moved, grown) in [
        ("fits", 2048, "start=4096, size=24", false, false),
        ("has-more", 2048, "start=4096, size=2048", false, false),
        ("none", 2048, "", true, false),
        ("short", 2048, "start=4096, size=16", true, false),
        ("grows", 96, "start=4096, size=2048", true, true),
        ("odd", 3001, "start=6144, size=512", true, true),
    ]
    .into_iter()
    .flat_map(|case| ["dos", "gpt"].map(|label| (label, case)))
    .map(|(label, (name, sectors, second, moved, grown))| {
        let table = format!("label: {label}\\nstart=2048, size={sectors}\\n{second}\\n");
        (format!("{label}-{name}"), sectors, table, moved, grown)
    }) {
        let case = Case::disk(&format!("verity-{name}"), &table);
        let said = done(&case.with_tree("new"));
        let line = text(case.at("new.verity"));
        assert!(said.contains(&line), "{name}: {said}");
        let place = if moved { "a new" } else { "the" };
        assert!(
            said.contains(&format!("the hash tree is in {place} second partition")),
            "{name}: {said}"
        );
        assert_eq!(said.contains("has grown"), grown, "{name}: {said}");
        let (old, new) = (bytes(case.at("old")), bytes(case.at("new")));
        assert_eq!(old[..MIB] == new[..MIB], !moved, "{name}: the table");
        done(&shell("sfdisk -q --verify \"$1\"", &[&case.at("new")]));
        let verity = Verity::parse(line.trim_end()).unwrap();
        case.cut("new");
        let data = bytes(case.at("data"));
        assert_eq!(data.len() as u64, verity.data_bytes(), "{name}: all blocks");
        assert!(data.len() >= sectors * 512, "{name}: it never shrinks");
        // Its own tree is ours, and nothing is behind it.
        write(case.at("its"), "");
        let (made, its) = case.judge("format", &verity, "its", &[]);
        assert!(made && its.contains(&verity.root_hash), "{name}: {its}");
        let (its, tree) = (bytes(case.at("its")), bytes(case.at("tree")));
        assert!(tree.starts_with(&its), "{name}: the tree");
        assert!(
            tree[its.len()..].iter().all(|b| *b == 0),
            "{name}: its rest"
        );
        let verify = |hash: &str| case.judge("verify", &verity, "tree", &[hash]);
        let (fits, why) = verify(&verity.root_hash);
        assert!(fits, "{name}: {why}");
        // Negative controls: another root hash, and a bit of the root, its padding and the tree.
        let other = verity.root_hash.replace(|c| c != '0', "0");
        assert!(!verify(&other).0, "{name}: another root hash");
        let (last_data, last_tree) = (data.len() - 1, its.len() - 1);
        let places = [
            ("data", 1024),
            ("data", last_data),
            ("tree", 0),
            ("tree", last_tree),
        ];
        for (part, at) in places {
            if its[last_tree] == 0 && (part, at) == ("tree", last_tree) {
                continue; // The rest of a block of hashes: the kernel reads no hash there.
            }
            flip(&case, part, at);
            assert!(!verify(&verity.root_hash).0, "{name}: {part} {at}");
            flip(&case, part, at);
        }
        assert!(verify(&verity.root_hash).0, "{name}: restored");
        // The same inputs, the same image; and again from this image.
        done(&case.with_tree("again"));
        assert!(bytes(case.at("again")) == new, "{name}: not reproducible");
        assert_eq!(text(case.at("again.verity")), line, "{name}");
    }
}

#[test]
fn parameters_beside_an_image_are_those_of_its_last_writer() {
    if cannot_run(&[]) {
        return;
    }
    let case = Case::disk("verity-beside", "label: dos\\nstart=2048, size=2048\\n");
    done(&case.with_tree("new"));
    assert!(case.at("new.verity").exists());
    let said = done(&case.replace("old"));
    assert!(!case.at("new.verity").exists(), "{said}");
    // An image or an init is never taken for parameters.
    let copied = |name: &str| {
        std::fs::copy(case.at("old"), case.at(name)).unwrap();
        case.command(name, "x")
            .args(["--no-nvml"])
            .output()
            .unwrap()
    };
    let refused = copied("x.verity");
    assert!(
        !refused.status.success() && stderr(&refused).contains("give the new image another name"),
        "{}",
        stderr(&refused)
    );
    assert!(bytes(case.at("x.verity")) == bytes(case.at("old")));
    done(&copied("y.verity"));
}

#[test]
fn what_can_have_no_hash_tree_is_refused_with_the_cure() {
    if cannot_run(&[]) {
        return;
    }
    let refused = |case: &Case, why: &str| {
        let output = case.with_tree("new");
        let said = stderr(&output);
        assert!(!output.status.success() && said.contains(why), "{said}");
        let left = crate::names(&case.dir.0);
        assert!(!left.iter().any(|name| name.starts_with("new")), "{left:?}");
    };
    let bare = Case::made("verity-bare");
    refused(
        &bare,
        "without a partition table has no second partition for the hash tree",
    );
    write(bare.at("old"), crate::initrd::archive(&[]));
    refused(&bare, "--verity is for disk images");
    // Kata's nvdimm header has a table of its own.
    let case = Case::new("verity-header");
    case.make(EROFS, "fs");
    let disk = "truncate -s 8M \"$2\"; printf 'label: dos\\nstart=6144, size=2048\\n' | sfdisk -q \
                \"$2\"; dd status=none conv=notrunc bs=512 seek=6144 if=\"$1\" of=\"$2\"; printf \
                '\\125\\252' | dd status=none conv=notrunc bs=1 seek=$((2097152 + 510)) of=\"$2\"";
    done(&shell(disk, &[&case.at("fs"), &case.at("old")]));
    refused(
        &case,
        "make the image with MEASURED_ROOTFS=yes, or omit --verity",
    );
    done(&case.replace("old"));
}

#[test]
fn the_other_verbs_read_an_image_with_a_hash_tree_and_verify_checks_it() {
    if cannot_run(&[]) {
        return;
    }
    let lines = "label: gpt\\nstart=2048, size=2048\\nstart=4096, size=2048\\n";
    let case = Case::disk("verity-verbs", lines);
    done(&case.with_tree("new"));
    let image = |words: &[&str]| {
        let mut command = Command::new(crate::collect::program());
        let command = command.current_dir(&case.dir.0).arg("image").args(words);
        crate::stdout(&command.output().unwrap())
    };
    assert!(image(&["ls", "new"]).contains("usr/bin/kata-agent"));
    let diff = image(&["diff", "old", "new"]);
    assert!(diff.contains("changed  /init"), "{diff}");
    let state = |what: &str, is_found: bool| {
        let report =
            serde_json::from_str::<serde_json::Value>(&image(&["verify", "new", "--json"]))
                .unwrap();
        assert_eq!(report["hashTree"], what, "{report}");
        let findings = report["findings"].as_array().unwrap();
        let mut rules = findings.iter().map(|f| f["rule"].as_str().unwrap());
        assert_eq!(rules.any(|rule| rule == "hash-tree"), is_found, "{report}");
    };
    state("fits", false);
    assert!(image(&["verify", "new"]).contains("second partition fits the root"));
    // A bit of the padding behind the root, and one of the tree.
    for at in [2 * MIB - 1, 2 * MIB] {
        flip(&case, "new", at);
        state("wrong", true);
        flip(&case, "new", at);
    }
    let line = text(case.at("new.verity"));
    write(case.at("new.verity"), line.replace("salt=", "salt=00"));
    state("wrong", true);
    std::fs::remove_file(case.at("new.verity")).unwrap();
    state("unknown", false);
}
