// Whether Python objects hold what they held: the pointers in modules, dictionaries, lists, tuples
// and sets, compared with those of before. Python could do the same in a hundred times the time.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace rekindle {

namespace {

enum class Kind { module, dict, list, tuple, set, tensor };

constexpr int no_child = -1;
constexpr int max_depth = 64;

struct Entry {
    PyObject* key;
    PyObject* value;
    int child;  // the node that says what is in the value, no_child of a leaf
};

// A number that a dictionary has of all dictionaries only while nothing is put into it or taken
// out; 0 where Python does not tell.
inline std::uint64_t version_of([[maybe_unused]] PyObject* dict) {
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX < 0x030C0000
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
    return 0;
#endif
}

// What is in a dictionary that can change itself. Its own version, where nothing in it can, stands
// here: most of the dictionaries of a module are empty, and each line of memory counts.
struct Child {
    PyObject* value;
    std::uint64_t version;  // of a dictionary, when it was last found to be the same
    int node;
    bool ends_here;  // a dictionary in which nothing can change
};

struct Node {
    Kind kind;
    PyTypeObject* type;
    std::size_t begin, end;   // of its entries
    std::size_t first, last;  // of its children, for a dictionary
};

// Pointers are borrowed and only compared. Who is followed is held at that moment by a container
// that was just found to hold it. Leaves are kept alive by `leaves`, so that no other object gets
// the address of one; types as well.
class Watch {
   public:
    Watch(nb::tuple modules, nb::handle module_class, nb::handle tensor_class)
        : module_class_(module_class.ptr()), tensor_class_(tensor_class.ptr()) {
        for (nb::handle module : modules) roots_.push_back(node_of(module.ptr(), 0));
        versions_.resize(roots_.size());
        module_class_ = tensor_class_ = nullptr;  // no longer needed
    }

    // What has to live as long as this does. It is not held here, where no collector sees it.
    nb::list take_leaves() { return std::exchange(leaves_, nb::list()); }

    // The tensors in the modules, in a fixed order; None where something else is in one of them.
    nb::object tensors(nb::tuple modules) {
        if (modules.size() != roots_.size()) return nb::none();
        nb::list found;
        for (std::size_t i = 0; i < roots_.size(); ++i)
            if (!same(roots_[i], modules[i].ptr(), versions_[i], found.ptr())) return nb::none();
        return found;
    }

   private:
    // The node of an object whose content can change; no_child of any other, which is a leaf.
    int node_of(PyObject* object, int depth) {
        if (depth > max_depth) throw nb::value_error("modules are nested too deeply");
        Kind kind;
        if (PyDict_Check(object))
            kind = Kind::dict;
        else if (PyList_CheckExact(object))
            kind = Kind::list;
        else if (PyTuple_CheckExact(object))
            kind = Kind::tuple;
        else if (PySet_Check(object))
            kind = Kind::set;
        else if (is_a(object, tensor_class_))
            kind = Kind::tensor;
        else if (is_a(object, module_class_))
            kind = Kind::module;
        else {
            leaves_.append(nb::borrow(object));
            return no_child;
        }
        leaves_.append(nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(object))));
        std::vector<Entry> entries = entries_of(kind, object, depth);
        Node node{kind, Py_TYPE(object), entries_.size(), 0, children_.size(), 0};
        entries_.insert(entries_.end(), entries.begin(), entries.end());
        for (const Entry& entry : entries)
            if (entry.child != no_child) {
                const Node& inner = node_at(entry.child);
                bool ends_here = inner.kind == Kind::dict && inner.first == inner.last;
                children_.push_back({entry.value, 0, entry.child, ends_here});
            }
        node.end = entries_.size();
        node.last = children_.size();
        nodes_.push_back(node);
        return static_cast<int>(nodes_.size()) - 1;
    }

    static bool is_a(PyObject* object, PyObject* type) {
        int found = PyObject_IsInstance(object, type);
        if (found < 0) throw nb::python_error();
        return found == 1;
    }

    std::vector<Entry> entries_of(Kind kind, PyObject* object, int depth) {
        std::vector<Entry> entries;
        auto add = [&](PyObject* key, PyObject* value) {
            entries.push_back({key, value, node_of(value, depth + 1)});
        };
        if (kind == Kind::dict) {
            // A copy: what a value is asked for runs Python code.
            nb::dict content = nb::borrow<nb::dict>(object);
            nb::list pairs = nb::steal<nb::list>(PyDict_Items(content.ptr()));
            for (nb::handle pair : pairs) {
                leaves_.append(pair[0]);
                add(nb::object(pair[0]).ptr(), nb::object(pair[1]).ptr());
            }
        } else if (kind == Kind::list || kind == Kind::tuple) {
            nb::tuple items = nb::steal<nb::tuple>(PySequence_Tuple(object));
            for (nb::handle item : items) add(nullptr, item.ptr());
        } else if (kind == Kind::set) {
            nb::object copy = nb::steal(PyFrozenSet_New(object));
            if (!copy.is_valid()) throw nb::python_error();
            for (nb::handle item : copy)  // whose comparison runs no code of Python
                if (!PyUnicode_CheckExact(item.ptr()) && !PyLong_CheckExact(item.ptr()))
                    throw nb::value_error("a set of other things than strings and numbers");
            leaves_.append(copy);
            entries.push_back({nullptr, copy.ptr(), no_child});
        } else if (kind == Kind::module) {
            nb::object content = nb::steal(PyObject_GenericGetDict(object, nullptr));
            if (!content.is_valid()) throw nb::python_error();
            add(nullptr, content.ptr());
        }
        return entries;
    }

    const Node& node_at(int index) const { return nodes_[static_cast<std::size_t>(index)]; }

    // A dictionary whose version was `version` when its pointers were last compared: if it still
    // is, they need not be. Sets the version where all is the same.
    bool same_dict(const Node& node, PyObject* object, std::uint64_t& version, PyObject* found) {
        const std::uint64_t now = version_of(object);
        if (now == 0 || now != version) {
            if (Py_TYPE(object) != node.type) return false;
            if (static_cast<std::size_t>(PyDict_Size(object)) != node.end - node.begin)
                return false;
            const Entry* entry = entries_.data() + node.begin;
            Py_ssize_t position = 0;
            PyObject *key, *value;
            for (; PyDict_Next(object, &position, &key, &value); ++entry)
                if (key != entry->key || value != entry->value) return false;
            // Another object may have got the address of one that was here.
            for (std::size_t i = node.first; i < node.last; ++i) children_[i].version = 0;
        }
        for (std::size_t i = node.first; i < node.last; ++i) {
            Child& child = children_[i];
            const bool is_same =
                child.ends_here && child.version != 0 && child.version == version_of(child.value);
            if (!is_same && !same(child.node, child.value, child.version, found)) return false;
        }
        version = now;
        return true;
    }

    bool same(int index, PyObject* object, std::uint64_t& version, PyObject* found) {
        const Node& node = node_at(index);
        if (node.kind == Kind::dict) {
            if (!PyDict_Check(object)) return false;
            return same_dict(node, object, version, found);
        }
        if (Py_TYPE(object) != node.type) return false;
        auto holds = [&](const Entry& entry, PyObject* value) {
            if (value != entry.value) return false;
            return entry.child == no_child || same(entry.child, value, version, found);
        };
        const std::size_t size = node.end - node.begin;
        const Entry* entry = entries_.data() + node.begin;
        switch (node.kind) {
            case Kind::tensor: return PyList_Append(found, object) == 0 || forget();
            case Kind::module: {
                PyObject* content = PyObject_GenericGetDict(object, nullptr);
                if (content == nullptr) return forget();
                bool equal = holds(*entry, content);
                Py_DECREF(content);  // the module holds it
                return equal;
            }
            case Kind::dict: break;  // see above
            case Kind::list:
                if (static_cast<std::size_t>(PyList_Size(object)) != size) return false;
                for (std::size_t i = 0; i < size; ++i)
                    if (!holds(entry[i], PyList_GetItem(object, static_cast<Py_ssize_t>(i))))
                        return false;
                return true;
            case Kind::tuple:
                if (static_cast<std::size_t>(PyTuple_Size(object)) != size) return false;
                for (std::size_t i = 0; i < size; ++i)
                    if (!holds(entry[i], PyTuple_GetItem(object, static_cast<Py_ssize_t>(i))))
                        return false;
                return true;
            case Kind::set: {
                if (PySet_Size(object) == 0 && PySet_Size(entry->value) == 0) return true;
                int equal = PyObject_RichCompareBool(object, entry->value, Py_EQ);
                return equal < 0 ? forget() : equal == 1;
            }
        }
        return false;
    }

    // An error in a comparison means that something is different.
    static bool forget() {
        PyErr_Clear();
        return false;
    }

    PyObject *module_class_, *tensor_class_;
    std::vector<int> roots_;
    std::vector<std::uint64_t> versions_;  // of their dictionaries
    std::vector<Node> nodes_;
    std::vector<Entry> entries_;
    std::vector<Child> children_;
    nb::list leaves_;
};

}  // namespace

void bind_watch(nb::module_& m) {
    nb::class_<Watch>(m, "Watch")
        .def(nb::init<nb::tuple, nb::handle, nb::handle>(), nb::arg("modules"),
             nb::arg("module_class"), nb::arg("tensor_class"),
             nb::sig("def __init__(self, modules: tuple[object, ...], module_class: object, "
                     "tensor_class: object) -> None"),
             "What modules hold now, with all that hangs on them.")
        .def("take_leaves", &Watch::take_leaves, nb::sig("def take_leaves(self) -> list[object]"),
             "What has to live as long as this does, once: the caller holds it.")
        .def("tensors", &Watch::tensors, nb::arg("modules"),
             nb::sig("def tensors(self, modules: tuple[object, ...]) -> list[object] | None"),
             "The tensors in the modules, in a fixed order; None where something is different.");
}

}  // namespace rekindle
