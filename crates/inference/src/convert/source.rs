//! The weights of a folder: `model.safetensors`, or the files that `model.safetensors.index.json` lists.

use super::ConvertError;
use crate::safetensors_file::{SafetensorsFile, View};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

#[derive(Debug)]
pub(super) struct Weights {
    files: Vec<SafetensorsFile>,
    /// Name to number of the file.
    by_name: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl Weights {
    pub fn open(folder: &Path) -> Result<Self, ConvertError> {
        let index = folder.join(INDEX);
        let listed = if index.exists() { Some(read_index(&index)?) } else { None };
        let names: BTreeSet<&str> = match &listed {
            Some(index) => index.weight_map.values().map(String::as_str).collect(),
            None => BTreeSet::from([SINGLE]),
        };
        let fail = |what: String| Err(ConvertError::Model { path: index.clone(), what });
        // The list comes with the model: it must not lead out of the folder.
        if let Some(bad) = names.iter().find(|n| Path::new(n).file_name().is_none_or(|f| f != **n)) {
            return fail(format!("`{bad}` is not the name of a file beside it"));
        }
        let files: Vec<SafetensorsFile> =
            names.iter().map(|name| SafetensorsFile::open(&folder.join(name))).collect::<Result<_, _>>()?;
        let mut by_name = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                if let Some(other) = by_name.insert(name.clone(), i) {
                    let (a, b) = (files[other].path().display(), file.path().display());
                    return fail(format!("tensor `{name}` is in {a} and in {b}"));
                }
            }
        }
        for (tensor, file) in listed.iter().flat_map(|l| &l.weight_map) {
            let found =
                by_name.get(tensor).is_some_and(|i| files[*i].path().file_name().is_some_and(|n| n == file.as_str()));
            if !found {
                return fail(format!(
                    "tensor `{tensor}` is not in {file}: a file is from another model, or unfinished"
                ));
            }
        }
        Ok(Self { files, by_name })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The file whose name stands for all in messages.
    pub fn path(&self) -> &Path {
        self.files.first().map_or(Path::new(SINGLE), SafetensorsFile::path)
    }

    /// A tensor that may be absent.
    pub fn find<'a>(&'a self, name: &'a str) -> Option<View<'a>> {
        self.files[*self.by_name.get(name)?].find(name)
    }
}

fn read_index(path: &Path) -> Result<Index, ConvertError> {
    let fail = |what: String| ConvertError::Model { path: path.to_owned(), what };
    let text = fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    let index: Index = serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?;
    if index.weight_map.is_empty() { Err(fail("the list of weights is empty".into())) } else { Ok(index) }
}
