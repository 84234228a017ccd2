//! containerd's CRI, asked as a kubelet asks it: RunPodSandbox, CreateContainer, StartContainer.
//! Each is one unary gRPC call by curl over containerd's socket; fields are numbered as in
//! k8s.io/cri-api/pkg/apis/runtime/v1/api.proto.

use super::kata::ROOTS;
use super::{EmulatedHost, KataHost};
use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kata_gpu_test_guest::protobuf::{Message, bytes_of};

/// The runtime's name in containerd's configuration, as a RuntimeClass gives it.
pub const RUNTIME: &str = "kata-gpu";
/// Before each gRPC message: whether it is compressed, and its length.
const PREFIX: usize = 5;
const NAMESPACE: &str = "tests";
/// Logs of the containers, one file each.
const LOGS: &str = "/var/log/pods";

/// Functions of bash: one gives containerd an image, all files of a folder and what it starts; one
/// prints the name of the image that containerd wants for a pod's sandbox.
pub(super) const IMPORT: &str = r#"image() { # NAME FOLDER ENTRYPOINT: as `docker save` writes one.
    cd "$(mktemp -d)"
    tar -C "$2" -cf layer.tar .
    echo '{"architecture": "amd64", "os": "linux", "config": {"Entrypoint": '"$3"'},
        "rootfs": {"type": "layers",
        "diff_ids": ["sha256:'"$(sha256sum < layer.tar | cut -d ' ' -f 1)"'"]}}' > config.json
    echo '[{"Config": "config.json", "RepoTags": ["'"$1"'"],
        "Layers": ["layer.tar"]}]' > manifest.json
    tar -cf - manifest.json config.json layer.tar | ctr --namespace k8s.io images import -
    rm -r "$PWD"
}
sandbox_image() {
    containerd config dump | sed -n 's/^ *sandbox_image = .\(.*\).$/\1/p'
}"#;

/// containerd's runtimes: a list in its configuration replaces its own, which has runc. The guest's
/// kernel has no network driver: Kata leaves CNI's interface on the host.
const RUNTIMES: &str = r#"set -e
cat >> /etc/containerd/config.toml <<END
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.@RUNTIME@]
runtime_type = "io.containerd.kata.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.@RUNTIME@.options]
ConfigPath = "@CONFIG@"
END
printf '[runtime]\ninternetworking_model = "none"\ndisable_new_netns = true\n' \
    > "$(dirname "@CONFIG@")/config.d/20-network.toml"
"#;

const NETWORK: &str = r#"{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp",
    "ipam": {"type": "host-local", "subnet": "10.88.0.0/24"}}]}"#;

/// Gives containerd the runtime [`RUNTIME`], from its next start on, with this configuration of
/// Kata's.
pub(super) fn has_runtime(host: &mut EmulatedHost, config: &str) -> Result<()> {
    let script = RUNTIMES
        .replace("@RUNTIME@", RUNTIME)
        .replace("@CONFIG@", config);
    host.run(&script).map(drop)
}

/// Lines for [`IMPORT`]: the containers' images.
pub(super) fn images() -> String {
    format!(
        "image {NAMESPACE}/debian:1 {ROOTS}/debian '[\"/usr/bin/cuda-program\"]'\n\
         image {NAMESPACE}/static:1 {ROOTS}/static '[\"/application\"]'\n"
    )
}

/// A pod's sandbox, with the configuration that each request about its containers repeats.
pub struct Pod {
    id: String,
    name: String,
    config: Message,
}

impl KataHost {
    /// Gives containerd what its CRI needs for pods of Kata's.
    pub fn with_cri(&mut self) -> Result<()> {
        has_runtime(&mut self.host, &self.config)?;
        let setup = format!(
            "set -e; mkdir -p /etc/cni/net.d {LOGS}; echo '{NETWORK}' > \
            /etc/cni/net.d/00-pods.conflist
            systemctl restart containerd\n{IMPORT}
            image \"$(sandbox_image)\" {ROOTS}/static '[\"/application\", \"pause\"]'\n{}",
            images()
        );
        self.host.run(&setup).map(drop)
    }

    /// RunPodSandbox; `words` go to the guest's kernel.
    pub fn run_pod_sandbox(&mut self, name: &str, words: &str) -> Result<Pod> {
        self.words(words)?;
        let metadata = Message::new()
            .text(1, name)
            .text(2, &format!("uid-of-{name}"))
            .text(3, NAMESPACE);
        let config = Message::new()
            .message(1, metadata)
            .text(2, name)
            .text(3, &format!("{LOGS}/{name}"));
        let answer = self.cri(
            "RunPodSandbox",
            Message::new().message(1, config.clone()).text(2, RUNTIME),
        )?;
        Ok(Pod {
            id: id_in(&answer)?,
            name: name.into(),
            config,
        })
    }

    /// CreateContainer; `devices` is what it asks for, as CDI names it. Gives its id.
    pub fn create_container(
        &mut self,
        pod: &Pod,
        name: &str,
        image: &str,
        arguments: &[&str],
        devices: &str,
    ) -> Result<String> {
        let variable = Message::new()
            .text(1, "VISIBLE_CDI_DEVICES")
            .text(2, devices);
        let config = Message::new()
            .message(1, Message::new().text(1, name))
            .message(
                2,
                Message::new().text(1, &format!("docker.io/{NAMESPACE}/{image}:1")),
            )
            .texts(4, arguments)
            .message(6, variable)
            .text(11, &format!("{name}.log"));
        let request = Message::new()
            .text(1, &pod.id)
            .message(2, config)
            .message(3, pod.config.clone());
        id_in(&self.cri("CreateContainer", request)?)
    }

    pub fn start_container(&mut self, id: &str) -> Result<()> {
        self.cri("StartContainer", Message::new().text(1, id))
            .map(drop)
    }

    /// StopPodSandbox and RemovePodSandbox, which take its containers with them; waits until
    /// nothing of any pod is left: neither a VM, nor a container, nor a network namespace or
    /// address.
    pub fn remove_pod_sandbox(&mut self, pod: &Pod) -> Result<()> {
        for method in ["StopPodSandbox", "RemovePodSandbox"] {
            self.cri(method, Message::new().text(1, &pod.id))?;
        }
        self.nothing_left(&pod.id)?;
        let left = self.host.run(
            "ctr --namespace k8s.io containers ls -q; ls /run/netns; ls -d \
                /var/lib/cni/networks/pods/10.* 2>/dev/null; true",
        )?;
        ensure!(left.is_empty(), "left of pod {}: {left}", pod.name);
        Ok(())
    }

    /// Waits until a container has ended; gives what it has written.
    pub fn cri_output(&mut self, pod: &Pod, name: &str, id: &str) -> Result<String> {
        self.host.until(
            &format!("end of container {name}"),
            &format!("! ctr --namespace k8s.io tasks ls -q | grep -x {id}"),
        )?;
        // Each line after its time, its stream and whether it is whole.
        self.host
            .run(&format!("cut -d ' ' -f 4- {LOGS}/{}/{name}.log", pod.name))
    }

    /// One call.
    fn cri(&mut self, method: &str, request: Message) -> Result<Vec<u8>> {
        let request = request.into_bytes();
        let mut body = vec![0];
        body.extend(u32::try_from(request.len())?.to_be_bytes());
        body.extend(request);
        let answer = self.host.run(&format!(
            "echo {} | base64 -d | curl --silent --show-error --fail --http2-prior-knowledge \
            --unix-socket /run/containerd/containerd.sock \
                --header 'content-type: application/grpc' --header 'te: trailers' --data-binary \
                    @- --dump-header /run/cri.headers \
                --output /run/cri.answer http://localhost/runtime.v1.RuntimeService/{method} || exit
            grep -i '^grpc-' /run/cri.headers; base64 -w 0 /run/cri.answer",
            STANDARD.encode(body)
        ));
        let answer = answer.with_context(|| format!("call {method}"))?;
        ensure!(
            answer
                .lines()
                .any(|line| line.trim().eq_ignore_ascii_case("grpc-status: 0")),
            "{method}: {answer}"
        );
        let message = STANDARD.decode(answer.lines().next_back().unwrap_or_default())?;
        Ok(message.get(PREFIX..).unwrap_or_default().to_vec())
    }
}

/// The id in an answer, which is its first field.
fn id_in(answer: &[u8]) -> Result<String> {
    let id = String::from_utf8(bytes_of(answer, 1)?.to_vec())?;
    ensure!(!id.is_empty(), "an answer without an id: {answer:?}");
    Ok(id)
}
